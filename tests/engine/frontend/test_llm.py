"""`LLM` as a script uses it, with the repository's own model in a real engine."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine import LLM, BeamSearchParams, PoolingParams, RepetitionDetectionParams, SamplingParams
from starling_engine.errors import ConfigError, EngineDead, InvalidRequest, ModelError, PromptTooLong
from starling_engine.params import StructuredOutputsParams
from transformers import AutoModelForCausalLM

from tests.engine.real_engine import MODEL, idle

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_waiting": 8, "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 64 << 20, "num_threads": 1, "show_progress": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["The list", "def f(x):", "Return a new", "os.path.join", "A dictionary is"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def is_idle(llm: LLM) -> bool:
    return llm._thread.run(idle(llm.engine))


def test_generates_in_order(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in alone]
    assert all(output.finished and len(output.outputs[0].token_ids) <= 12 for output in outputs)
    tokenizer = llm.get_tokenizer()
    for output in outputs:
        whole = tokenizer.decode([*output.prompt_token_ids, *output.outputs[0].token_ids])
        assert whole == (output.prompt or "") + output.outputs[0].text


def test_takes_prompts_of_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The list")
    forms: list[Any] = [{"prompt": "The list"}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(["The list", *forms], GREEDY, use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["The list", "The list", None, None]
    assert llm.generate([], GREEDY) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequest, match="3 sampling_params for 2 prompts"):
        llm.generate(PROMPTS[:2], params)


def test_outputs_have_the_form_that_each_wants(llm: LLM) -> None:
    forms = [StructuredOutputsParams(choice=["yes", "Grüße"]), StructuredOutputsParams(regex="[A-Z]{2,5}"), None]
    params = [SamplingParams(structured_outputs=form, n=3, max_tokens=30, seed=5) for form in forms]
    chosen, letters, free = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert {one.text for one in chosen.outputs} <= {"yes", "Grüße"} and len(chosen.outputs) == 3
    assert all(one.text.isupper() and 2 <= len(one.text) <= 5 for one in letters.outputs)
    assert {one.finish_reason for one in [*chosen.outputs, *letters.outputs]} == {"stop"}
    assert not any(one.text.isupper() for one in free.outputs)


def test_every_form_is_checked_before_anything_runs(llm: LLM) -> None:
    before = llm.engine.stats.prompt_tokens_total
    good, bad = (SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)) for regex in ("[a-z]+", "a(b"))
    with pytest.raises(InvalidRequest, match="unclosed group") as caught:
        llm.generate(["a", "b"], [good, bad], use_tqdm=False)
    assert caught.value.param == "structured_outputs.regex"
    assert caught.value.__notes__ == ["(prompt 1 of 2, counted from 0)"]
    assert is_idle(llm) and llm.engine.stats.prompt_tokens_total == before


def test_defaults_come_from_the_model(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    written = json.loads((Path(MODEL) / "generation_config.json").read_text())
    for name in ("temperature", "top_p", "repetition_penalty"):
        assert getattr(defaults, name) == written[name] != getattr(SamplingParams(), name)
    assert 1 <= len(llm.generate("The", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_more_prompts_than_may_wait(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, seed=1)
    outputs = llm.generate([f"{number} is" for number in range(40)], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == [f"{number} is" for number in range(40)]
    assert all([len(one.token_ids) for one in output.outputs] == [4, 4] for output in outputs)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "words"),
    [
        (["a", "b " * 600], GREEDY, PromptTooLong, "This model's maximum context length is 512 .* at most 511"),
        (["a", [0, 10**6]], GREEDY, InvalidRequest, "token ids must be in"),
        (["a", ""], GREEDY, InvalidRequest, "at least one token"),
        (["a", "b"], [GREEDY, SamplingParams(temperature=-1)], InvalidRequest, "temperature"),
        (["a", None], GREEDY, InvalidRequest, "a prompt is text"),
    ],
)
def test_a_bad_request_in_a_batch_leaves_nothing_behind(
    prompts: list[Any], params: Any, error: type[Exception], words: str, llm: LLM
) -> None:
    before = llm.engine.stats.prompt_tokens_total
    with pytest.raises(error, match=words) as caught:
        llm.generate(prompts, params)
    assert None in prompts or caught.value.__notes__ == ["(prompt 1 of 2, counted from 0)"]
    assert is_idle(llm)
    assert llm.engine.stats.prompt_tokens_total == before


def test_arguments_of_the_wrong_kind_are_refused_by_name(llm: LLM) -> None:
    calls: dict[str, Callable[[], object]] = {
        "prompts[0]": lambda: llm.generate(3),  # type: ignore[arg-type]
        "sampling_params": lambda: llm.generate("a", 3),  # type: ignore[arg-type]
        "priority": lambda: llm.generate("a", GREEDY, priority="high"),  # type: ignore[arg-type]
        "params": lambda: llm.beam_search("a", None),  # type: ignore[arg-type]
        "messages": lambda: llm.chat("a"),  # type: ignore[arg-type]
        "queries": lambda: llm.score({"content": "a"}, "b"),  # type: ignore[arg-type]
        "documents[1]": lambda: llm.score("a", ["b", 3]),  # type: ignore[list-item]
        "truncate_prompt_tokens": lambda: llm.embed("a", truncate_prompt_tokens="9"),  # type: ignore[arg-type]
    }
    for param, call in calls.items():
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.param == param


def test_an_interrupt_ends_the_requests(llm: LLM, request: pytest.FixtureRequest) -> None:
    # A shell starts what runs in its background with SIGINT ignored, and Python then leaves it so.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    assert is_idle(llm)

    def interrupt() -> None:
        while not llm.engine.stats.running:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt, daemon=True).start()
        llm.generate(["The"] * 200, SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
    assert is_idle(llm)
    assert llm.generate("The", GREEDY, use_tqdm=False)[0].finished


def test_several_threads(llm: LLM) -> None:
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with ThreadPoolExecutor(5) as pool:
        found = pool.map(lambda prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text, PROMPTS)
    assert list(found) == expected


def test_stop_strings_end_the_request_in_the_engine(llm: LLM) -> None:
    free = llm.generate("The list", SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)[0].outputs[0]
    stop = free.text[8:12]
    cut = free.text.index(stop)
    for include in (False, True):
        params = SamplingParams(temperature=0.0, max_tokens=400, stop=[stop], include_stop_str_in_output=include)
        output = llm.generate("The list", params, use_tqdm=False)[0].outputs[0]
        assert output.text == free.text[: cut + len(stop) if include else cut]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert is_idle(llm)


def test_stop_tokens(llm: LLM) -> None:
    free = llm.generate("The list", GREEDY, use_tqdm=False)[0].outputs[0]
    token = free.token_ids[4]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[token])
    output = llm.generate("The list", params, use_tqdm=False)[0].outputs[0]
    kept = free.token_ids[: free.token_ids.index(token) + 1]
    assert (output.token_ids, output.stop_reason) == (kept, token)
    assert output.text == llm.get_tokenizer().decode(kept[:-1])


def test_an_output_that_repeats_itself_ends(llm: LLM) -> None:
    wanted = RepetitionDetectionParams(max_pattern_size=4, min_count=5)
    params = SamplingParams(temperature=0.0, max_tokens=30, allowed_token_ids=[300], repetition_detection=wanted)
    output = llm.generate("The list", params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([300] * 5, "repetition", "repetition_detected")
    assert output.text == llm.get_tokenizer().decode([300] * 5)


def test_logprobs_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate("Return a new list", params, use_tqdm=False)[0]
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert output.outputs[0].logprobs is not None
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(rows) == len(ids) - 1
    for place, row in enumerate(rows):
        assert row is not None and ids[place + 1] in row
        for token, logprob in row.items():
            assert logprob.logprob == pytest.approx(expected[place, token].item(), abs=1e-3)
            assert logprob.rank == 1 + int((expected[place] > expected[place, token] + 1e-4).sum())
            assert logprob.decoded_token == llm.get_tokenizer().token_text(token)
    chosen = [row[token].logprob for row, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)]
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(chosen))


QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


def test_chats_as_transformers(llm: LLM, reference: Any) -> None:
    output = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0]
    assert output.prompt == llm.get_tokenizer().render_chat(QUESTION).text
    found = reference.generate(
        torch.tensor([output.prompt_token_ids]), do_sample=False, max_new_tokens=12, repetition_penalty=1.0, temperature=None,
        top_p=None,
    )  # fmt: skip
    assert output.outputs[0].token_ids == found[0, len(output.prompt_token_ids) :].tolist()


def test_several_conversations(llm: LLM) -> None:
    other = [*QUESTION, {"role": "assistant", "content": "It joins"}, {"role": "user", "content": [{"type": "text", "text": "Hm"}]}]
    both = llm.chat([QUESTION, other], [GREEDY, GREEDY], use_tqdm=False)
    assert both[0].outputs[0].text == llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert "Hm<|im_end|>" in (both[1].prompt or "")


def test_chat_goes_on_with_the_last_message(llm: LLM) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "Join one"}]
    output = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)[0]
    assert (output.prompt or "").endswith("assistant\nJoin one")
    own = "{{ messages[0].content }}{{ suffix }}"
    output = llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template=own, chat_template_kwargs={"suffix": "!"})[0]
    assert output.prompt == "What does os.path.join do?!"


def test_embeds(llm: LLM, reference: Any) -> None:
    outputs = llm.embed(PROMPTS[:3], use_tqdm=False)
    for output in outputs:
        with torch.no_grad():
            hidden = reference.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0].mean(0)
        expected = (hidden / hidden.norm()).tolist()
        assert output.outputs.embedding == pytest.approx(expected, abs=1e-3)
    last = llm.embed("The list", PoolingParams(pooling="last", normalize=False), use_tqdm=False)[0].outputs.embedding
    assert math.hypot(*last) != pytest.approx(1.0, abs=1e-3)
    short = llm.embed("The list", PoolingParams(pooling="last", dimensions=24), use_tqdm=False)[0].outputs.embedding
    assert short == pytest.approx([number / math.hypot(*last[:24]) for number in last[:24]], abs=1e-4)
    for wrong in (0, 257):
        with pytest.raises(InvalidRequest, match=r"dimensions must be in \[1, 256\]"):
            llm.embed("a", PoolingParams(dimensions=wrong))
    with pytest.raises(InvalidRequest, match="does not tell the second text of a pair from the first"):
        llm.embed("a", PoolingParams(second_from=1))
    before = llm.engine.stats.prompt_tokens_total
    with pytest.raises(PromptTooLong):
        llm.embed(["a", "b " * 600])
    assert is_idle(llm) and llm.engine.stats.prompt_tokens_total == before


def test_vectors_of_tokens_that_several_steps_compute(llm: LLM, reference: Any) -> None:
    """A step has 128 tokens here, and the second time the prefix is cached."""
    prompts = [list(range(100, 400)), list(range(100, 130))]
    for _ in range(2):
        for output in llm.encode(prompts, use_tqdm=False, pooling_task="token_embed"):
            with torch.no_grad():
                hidden = reference.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            theirs = torch.nn.functional.normalize(hidden, dim=1)
            torch.testing.assert_close(torch.tensor(output.outputs.data), theirs, atol=1e-3, rtol=0)


def test_logits_of_some_tokens_stand_for_a_vector(llm: LLM, reference: Any) -> None:
    params = PoolingParams(logit_token_ids=[894, 979, 3])
    for output in llm.embed([*PROMPTS, *PROMPTS], params, use_tqdm=False):
        with torch.no_grad():
            logits = reference(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert output.outputs.embedding == pytest.approx(logits[[894, 979, 3]].tolist(), abs=1e-3)
    with pytest.raises(InvalidRequest, match="token id 4096 is not in the vocabulary"):
        llm.embed("a", PoolingParams(logit_token_ids=[4096]))
    with pytest.raises(InvalidRequest, match="is for the task embed, got token_embed"):
        llm.encode("a", PoolingParams(task="token_embed", logit_token_ids=[3]))


@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (2, 1.0), (4, 0.0), (4, 1.0), (5, 2.0), (3, -1.0)])
@pytest.mark.parametrize("prompt", ["The list", "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello!"])
def test_beam_search_finds_what_transformers_finds(
    prompt: str, width: int, length_penalty: float, llm: LLM, reference: Any
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=10, length_penalty=length_penalty)
    ids = llm.get_tokenizer().encode(prompt)
    found = reference.generate(
        torch.tensor([ids]), num_beams=width, num_return_sequences=width, do_sample=False, early_stopping="never",
        length_penalty=length_penalty, max_new_tokens=10, repetition_penalty=1.0, temperature=None, top_p=None,
        return_dict_in_generate=True, output_scores=True, pad_token_id=0,
    )  # fmt: skip
    sequences = llm.beam_search(prompt, params)[0].sequences
    eos = llm.engine.model_config.eos_token_ids
    for ours, theirs in zip(sequences, found.sequences.tolist(), strict=True):
        end = next((place + 1 for place in range(len(ids), len(theirs)) if theirs[place] in eos), len(theirs))
        assert ours.tokens == theirs[:end]
        assert ours.finish_reason == ("stop" if theirs[end - 1] in eos else "length")
        assert ours.text == llm.get_tokenizer().decode(ours.tokens)
    if width > 1:
        scores = [one.cum_logprob / (len(one.tokens) - len(ids)) ** length_penalty for one in sequences]
        assert scores == pytest.approx(found.sequences_scores.tolist(), abs=1e-3)


def test_beam_search_refuses_before_it_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="beam_width must be in"):
        llm.beam_search("a", BeamSearchParams(beam_width=50, max_tokens=3))
    with pytest.raises(PromptTooLong, match=r"505 tokens and max_tokens is 10, but at most 512"):
        llm.beam_search([5] * 505, BeamSearchParams(beam_width=2, max_tokens=10))


def test_cached_prompts(llm: LLM) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_shows_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_says_which_argument_is_wrong() -> None:
    with pytest.raises(ConfigError, match="max_tokens: there is no such argument"):
        LLM(MODEL, max_tokens=3)
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override: there is no such argument; give kv_cache_memory_bytes$"):
        LLM(MODEL, num_gpu_blocks_override=100)
    with pytest.raises(ConfigError, match="skip_tokenizer_init: there is no such argument; leave it out: prompts may be token ids"):
        LLM(MODEL, skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="block_size"):
        LLM(MODEL, block_size=7)


def test_a_model_that_is_not_there_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ModelError):
        LLM(str(tmp_path))
    deadline = time.monotonic() + 60  # threads of a pool may take a moment to end
    while left := [thread for thread in threading.enumerate() if thread not in before and "tqdm" not in repr(thread).lower()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


SCRIPT = """
import faulthandler
faulthandler.dump_traceback_later(90, exit=True)  # where it hangs, if it does
from starling_engine import LLM, SamplingParams
llm = LLM({model!r}, **{settings!r})
process = llm.engine.cores.processes[0]
print(process.pid, process._folder)
print(llm.generate("The", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished)
{end}
"""
ENDS = ("raise SystemExit", "del llm; del process", "llm.shutdown(); llm.shutdown()")


@pytest.mark.parametrize("end", ["", *(pytest.param(end, marks=pytest.mark.whole) for end in ENDS)])
def test_a_program_that_ends_leaves_nothing_behind(end: str) -> None:
    code = SCRIPT.format(model=MODEL, settings=SETTINGS, end=end)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    core, result = done.stdout.splitlines()
    pid, folder = core.split()
    assert result == "True"
    assert "Traceback" not in done.stderr
    assert not Path(folder).exists() and not Path(f"/proc/{pid}").exists()


def test_after_shutdown() -> None:
    llm = LLM(MODEL, **SETTINGS)
    llm.shutdown()
    with pytest.raises(EngineDead, match="was shut down"):
        llm.generate("The", GREEDY, use_tqdm=False)
