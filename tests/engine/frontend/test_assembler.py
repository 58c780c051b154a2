"""The core's deltas become the caller's output."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starling_engine.delta import Delta
from starling_engine.frontend.assembler import Assembler
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.outputs import EarlierOutput, EarlierRun, Logprob, OutputDelta
from starling_engine.params import SamplingParams
from starling_engine.step import LogprobRow


@pytest.fixture
def tokenizer(loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded["byte_level"]


def assembler(tokenizer: Tokenizer, *, cumulative: bool = True, prompt: str = "x", **params: Any) -> Assembler:
    return Assembler("r", prompt, tokenizer.encode(prompt), SamplingParams(**params), tokenizer, cumulative=cumulative)


def delta(tokens: list[int], **fields: Any) -> Delta:
    return Delta(id="r/0", tokens=tokens, **fields)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.encode(char)[0] for char in text]


def test_streams_and_sums_up(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer)
    assert run.take() is None
    assert not run.push(0, delta(letters(tokenizer, "ab"), cached_tokens=3))
    first = run.take()
    assert first is not None
    assert (first.outputs[0].text, first.num_cached_tokens, first.finished) == ("ab", 3, False)
    assert run.take() is None
    # Another core took over, and found what was generated cached as well.
    assert not run.push(0, delta(letters(tokenizer, "c"), attempt=1, cached_tokens=8))
    assert not run.push(0, delta(letters(tokenizer, "d"), finish_reason="length"))
    second = run.take()
    assert second is not None and second.finished and run.finished
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == ("cd", "length")
    assert second.outputs[0].token_ids == letters(tokenizer, "cd")
    assert run.take() is None
    whole = run.output()
    assert (whole.prompt, whole.prompt_token_ids) == ("x", tokenizer.encode("x"))
    assert (whole.outputs[0].text, whole.outputs[0].token_ids) == ("abcd", letters(tokenizer, "abcd"))
    assert whole.finished and whole.outputs[0].finish_reason == "length" and whole.num_cached_tokens == 3


def test_results_do_not_change_later(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, logprobs=0)
    row = LogprobRow([5], [-1.0], 2)
    run.push(0, delta([5], logprobs=[row]))
    taken, whole = run.take(), run.output()
    run.push(0, delta([5], logprobs=[row]))
    assert taken is not None
    assert len(taken.outputs[0].token_ids) == len(whole.outputs[0].token_ids) == 1
    assert len(taken.outputs[0].logprobs or []) == len(whole.outputs[0].logprobs or []) == 1


def test_drops_taken_text_unless_cumulative(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, cumulative=False)
    run.push(0, delta(letters(tokenizer, "ab")))
    assert run.take() is not None
    run.push(0, delta(letters(tokenizer, "c")))
    later = run.take()
    assert later is not None and later.outputs[0].text == "c"
    with pytest.raises(AssertionError):
        run.output()


def test_a_stop_string_ends_the_sequence_here(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, stop="cd", logprobs=0)
    ids = letters(tokenizer, "abcdef")
    rows = [LogprobRow([id_], [-float(place)], 1) for place, id_ in enumerate(ids)]
    assert not run.push(0, delta(ids[:3], logprobs=rows[:3]))
    assert run.push(0, delta(ids[3:], logprobs=rows[3:])), "the core goes on until it is told to stop"
    assert not run.push(0, delta(ids)), "what it sends until then is not wanted"
    assert not run.push(0, delta([], finish_reason="length"))
    output = run.output().outputs[0]
    assert (output.text, output.token_ids) == ("ab", ids[:4])
    assert (output.finish_reason, output.stop_reason) == ("stop", "cd")
    assert (len(output.logprobs or []), output.cumulative_logprob) == (4, -6.0)


def test_no_abort_for_sequences_that_the_core_ended(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, stop=["b"])
    assert not run.push(0, delta(letters(tokenizer, "abc"), finish_reason="length"))
    output = run.output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b")
    assert output.token_ids == letters(tokenizer, "ab")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_a_token_but_no_text(include: bool, text: str, tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, include_stop_str_in_output=include)
    ids = letters(tokenizer, "ab")
    run.push(0, delta(ids, finish_reason="stop", stop_token=ids[1]))
    output = run.output().outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == (text, ids, ids[1])


def test_the_end_of_sequence_has_no_stop_reason(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, skip_special_tokens=False)
    assert tokenizer.eos_token_id is not None
    run.push(0, delta([*letters(tokenizer, "a"), tokenizer.eos_token_id], finish_reason="stop"))
    output = run.output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", None)
    assert len(output.token_ids) == 2


def test_an_output_that_stops_without_such_a_token_has_all_its_text(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer)
    run.push(0, delta(letters(tokenizer, "ab"), finish_reason="stop", last_is_text=True))
    output = run.output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)


def test_a_repetition_is_a_stop_reason_and_is_text(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer)
    run.push(0, delta(letters(tokenizer, "aaa"), finish_reason="repetition"))
    output = run.output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("aaa", "repetition", "repetition_detected")


def test_held_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, stop=["abc"])
    run.push(0, delta(letters(tokenizer, "ab")))
    first = run.take()
    assert first is not None and (first.outputs[0].text, len(first.outputs[0].token_ids)) == ("", 2)
    run.push(0, delta([], finish_reason="abort"))
    last = run.take()
    assert last is not None and (last.outputs[0].text, last.outputs[0].finish_reason) == ("ab", "abort")


def test_several_outputs(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, n=3)
    run.push(2, delta(letters(tokenizer, "c"), cached_tokens=9, queue_seconds=9.0))
    run.push(0, delta(letters(tokenizer, "a"), finish_reason="length", cached_tokens=1, queue_seconds=1.0))
    item = run.take()
    assert item is not None and not item.finished and (item.num_cached_tokens, item.queue_seconds) == (1, 1.0), "the prompt's"
    assert [(output.index, output.text) for output in item.outputs] == [(0, "a"), (2, "c")]
    run.push(1, delta(letters(tokenizer, "b"), finish_reason="stop"))
    run.push(2, delta(letters(tokenizer, "d"), finish_reason="length"))
    item = run.take()
    assert item is not None and item.finished
    assert [(output.index, output.text) for output in item.outputs] == [(1, ""), (2, "d")]
    assert [output.text for output in run.output().outputs] == ["a", "", "cd"]


def test_logprobs_have_texts(tokenizer: Tokenizer) -> None:
    a, b, c = letters(tokenizer, "abc")
    run = assembler(tokenizer, logprobs=2)
    chosen_among_the_top = LogprobRow([b, a, b], [-2.0, -1.0, -2.0], 2)
    chosen_below = LogprobRow([c, a, b], [-7.0, -1.0, -2.0], 30)
    run.push(0, delta([b, c], logprobs=[chosen_among_the_top, chosen_below]))
    logprobs = run.output().outputs[0].logprobs
    assert logprobs == [
        {b: Logprob(-2.0, 2, "b"), a: Logprob(-1.0, 1, "a")},
        {c: Logprob(-7.0, 30, "c"), a: Logprob(-1.0, 1, "a"), b: Logprob(-2.0, 2, "b")},
    ]
    assert [next(iter(position)) for position in logprobs or []] == [b, c], "the chosen token comes first"
    assert run.output().outputs[0].cumulative_logprob == -9.0


def test_prompt_logprobs_come_once_and_whole(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, prompt_logprobs=0, prompt="abc", n=2)
    rows = [LogprobRow([id_], [-1.0], 1) for id_ in tokenizer.encode("abc")]
    assert not run.push(0, delta([], prompt_logprobs=rows[:1]))
    assert run.take() is None
    run.push(1, delta(letters(tokenizer, "x")))
    fork = run.take()
    assert fork is not None and fork.prompt_logprobs is None
    run.push(0, delta(letters(tokenizer, "x"), prompt_logprobs=rows[1:]))
    first = run.take()
    assert first is not None and first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [list(position or ()) for position in first.prompt_logprobs[1:]] == [[row.token_ids[0]] for row in rows]
    run.push(0, delta(letters(tokenizer, "x")))
    second = run.take()
    assert second is not None and second.prompt_logprobs is None
    assert run.output().prompt_logprobs == first.prompt_logprobs


def test_without_detokenizing(tokenizer: Tokenizer) -> None:
    run = assembler(tokenizer, detokenize=False, logprobs=0)
    run.push(0, delta([5], logprobs=[LogprobRow([5], [-1.0], 1)], finish_reason="stop"))
    output = run.output().outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == ("", [5], [{5: Logprob(-1.0, 1, None)}])


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 5)), stop=st.sampled_from([[], ["a"], ["é "], ["🎉"]]))
def test_the_deltas_add_up_to_the_output(text: str, cuts: list[int], stop: list[str], loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    run = assembler(tokenizer, stop=stop)
    ids = tokenizer.encode(text)
    items = []
    for cut in cuts:
        run.push(0, delta(ids[:cut]))
        ids = ids[cut:]
        items.append(run.take())
    run.push(0, delta(ids, finish_reason="length"))
    items.append(run.take())
    outputs = [item.outputs[0] for item in items if item is not None]
    whole = run.output().outputs[0]
    assert "".join(output.text for output in outputs) == whole.text
    assert [id_ for output in outputs for id_ in output.token_ids] == whole.token_ids
    assert outputs[-1].finish_reason == whole.finish_reason


@pytest.mark.parametrize("stop", [None, ["cde", "zé"]])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_earlier_run_is_replayed_after_any_token(tokenizer: Tokenizer, stop: list[str] | None, logprobs: int | None) -> None:
    tokens = [token for char in "abcdabé🙂zé" for token in tokenizer.encode(char)]
    deltas = [delta([token], logprobs=[LogprobRow([token], [-1.0], 1)]) for token in tokens]
    deltas[-1].finish_reason = "length"

    def rest_of(run: Assembler, behind: int) -> tuple[list[OutputDelta], str]:
        taken = []
        for each in deltas[behind:]:
            run.push(0, each)
            if (gains := run.take()) is not None:
                taken += gains.outputs
        return taken, "".join(output.text for output in taken)

    for cut in range(1, len(tokens)):
        undisturbed = assembler(tokenizer, cumulative=False, stop=stop, logprobs=logprobs)
        for each in deltas[:cut]:
            undisturbed.push(0, each)
        before = undisturbed.take()
        resumed = assembler(tokenizer, cumulative=False, stop=stop, logprobs=logprobs)
        replayed = resumed.replay(EarlierRun([EarlierOutput(tokens[:cut])], num_cached_tokens=4))
        assert before is not None and replayed is not None and replayed.replayed
        assert (replayed.outputs[0].text, replayed.num_cached_tokens) == (before.outputs[0].text, 4)
        assert rest_of(resumed, cut) == rest_of(undisturbed, cut)


@pytest.mark.parametrize(("reason", "stop_reason", "shown"), [("stop", None, "ab"), ("stop", "c", "ab"), ("length", None, "abc")])
def test_an_output_that_ended_stays_ended(tokenizer: Tokenizer, reason: Any, stop_reason: str | None, shown: str) -> None:
    run = assembler(tokenizer, cumulative=False, n=2, stop=["c"] if stop_reason else None)
    ended = EarlierOutput(letters(tokenizer, "abc"), reason, stop_reason)
    gains = run.replay(EarlierRun([ended, EarlierOutput()]))
    assert gains is not None and not gains.finished and run.is_finished(0) and not run.is_finished(1)
    assert [(o.text, o.finish_reason, o.stop_reason) for o in gains.outputs] == [(shown, reason, stop_reason)]
