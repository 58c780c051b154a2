"""Requests with grammars in a real core: what they sample, how they wait for their grammar, and how they end without one."""

import json
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from starling_engine.config import SpeculativeConfig, VocabularyConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.request_state import Gate
from starling_engine.scheduler import grammar_builds
from starling_engine.structured_output import json_grammar
from starling_engine.structured_output.matcher import GrammarMatcher
from starling_engine.structured_output.vocabulary import read_vocabulary
from transformers import AutoModelForCausalLM, DynamicCache

from tests.engine.cores import core_for
from tests.engine.late_device import use_late_device
from tests.engine.real_engine import MODEL

FOLDER = Path(MODEL)
EOS = 2
VOCABULARY = read_vocabulary(VocabularyConfig(MODEL, 4096, (EOS,)))
SCHEMA = {
    "type": "object",
    "properties": {"return_value": {"type": "integer"}, "description": {"enum": ["short", "long", "none at all"]}},
    "required": ["return_value", "description"],
    "additionalProperties": False,
}
SETTINGS: dict[str, Any] = {"eos_token_ids": (EOS,), "max_model_len": 400}
GRAMMARS = [
    json_grammar(SCHEMA),
    llguidance.LLMatcher.grammar_from_regex(r"(def|class) [a-z_]{3,12}\(\):"),
    json_grammar({"enum": [f"{word} <|im_end|> and <|im_start|>user" for word in ("self", "return", "None")]}),
]
PROMPTS = [VOCABULARY.tokenize_str(text) for text in ("Return the current value of", "class Thread:\n    def run")]


def request(name: str, grammar: str, prompt: int = 0, **params: Any) -> EngineRequest:
    settings = {"temperature": 0.0, "max_tokens": 350, **params}
    return EngineRequest(id=name, prompt_ids=PROMPTS[prompt], params=SamplingParams(**settings), seed=7, grammar=grammar)


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, tuple[list[int], str | None, str | None]]:
    """Returns each request's tokens, finish reason and error."""
    for one in requests:
        assert core.add(one) is None
    tokens: dict[str, list[int]] = {name: [] for name in core.scheduler.requests}
    ends: dict[str, tuple[str | None, str | None]] = {}
    deadline = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < deadline
        for delta in core.step():
            tokens[delta.id] += delta.tokens
            if delta.finish_reason is not None:
                ends[delta.id] = (delta.finish_reason, delta.error)
        core.scheduler.check_integrity()
    return {name: (tokens[name], *end) for name, end in ends.items()}


def greedy(grammar: str, prompt: list[int]) -> list[int]:
    """Returns what transformers' model says under the library's masks, one token after the other."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    matcher, tokens, cache = llguidance.LLMatcher(VOCABULARY, grammar), list(prompt), DynamicCache()
    while not matcher.is_stopped():
        with torch.no_grad():
            logits = model(torch.tensor([tokens[cache.get_seq_length() :]]), past_key_values=cache).logits[0, -1]
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: len(logits)]
        tokens.append(int(logits.masked_fill(torch.from_numpy(bits == 0), float("-inf")).argmax()))
        matcher.consume_token(tokens[-1])
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {f"{g}{p}": greedy(grammar, prompt) for g, grammar in enumerate(GRAMMARS) for p, prompt in enumerate(PROMPTS)}


def on_host(_: Callable[..., None]) -> None:
    """Leaves the host's runner in place."""


def on_recording_device(patch: Callable[..., None]) -> None:
    use_late_device(patch, recorded=True)


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("where", [on_host, on_recording_device])
def test_tokens_are_those_of_transformers_under_the_same_masks(
    where: Callable[..., None], speculative: bool, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced tokens jump forward, or have steps of their own where `speculative` is False."""
    where(monkeypatch.setattr)
    asked = [request(name, GRAMMARS[int(name[0])], int(name[1]), speculative=speculative) for name in expected]
    with core_for(FOLDER, **SETTINGS) as core:
        found = run(core, asked)
        stats = core.scheduler.stats
    assert {name: tokens for name, (tokens, *_) in found.items()} == expected
    assert {end for _, *end in found.values() for end in end} == {"stop", None}
    assert bool(stats.jump_forward_tokens_total) == speculative and not stats.spec_draft_tokens_total
    for name, (tokens, *_) in found.items():
        assert not any(map(VOCABULARY.is_special_token, tokens[:-1]))
        if name[0] in "02":
            json.loads(VOCABULARY.decode_str([token for token in tokens if token != EOS]))


def test_a_request_goes_on_elsewhere_where_it_was(expected: dict[str, list[int]]) -> None:
    name, whole = next(iter(expected.items()))
    with core_for(FOLDER, **SETTINGS) as core:
        for cut in (1, len(whole) // 2, len(whole) - 1):
            resumed = request(name, GRAMMARS[0])
            resumed.output_ids, resumed.attempt = whole[:cut], 1
            assert run(core, [resumed])[name][:2] == (whole[cut:], "stop")


def test_a_core_goes_on_while_the_output_of_another_is_taken_again(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's grammar thread does that, and may be late."""
    name, whole = next(iter(expected.items()))
    resumed, replay, released = request(name, GRAMMARS[0]), GrammarMatcher.replay, threading.Event()
    resumed.output_ids, resumed.attempt = whole[:-3], 1

    def slow(matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert released.wait(30)
        replay(matcher, tokens)

    monkeypatch.setattr(GrammarMatcher, "replay", slow)
    with core_for(FOLDER, **SETTINGS) as core:
        for one in (resumed, request("free", "", max_tokens=5)):
            core.add(one)
        while "free" in core.scheduler.requests:
            core.step()
        assert core.scheduler.requests[name].gates == {Gate.GRAMMAR}
        core.scheduler.check_integrity()
        released.set()
        assert run(core, [])[name] == (whole[-3:], "stop", None)


def test_who_ignores_the_end_jumps_forward_too(expected: dict[str, list[int]]) -> None:
    name, whole = next(iter(expected.items()))
    with core_for(FOLDER, **SETTINGS) as core:
        assert run(core, [request(name, GRAMMARS[0], ignore_eos=True)])[name] == (whole, "stop", None)
        assert core.scheduler.stats.jump_forward_tokens_total > 0


def test_min_tokens_do_not_keep_a_finished_output_open() -> None:
    grammar = llguidance.LLMatcher.grammar_from_lark('start: "yes" | "no"')
    with core_for(FOLDER, **SETTINGS) as core:
        tokens, reason, error = run(core, [request("a", grammar, min_tokens=50)])["a"]
    assert VOCABULARY.decode_str(tokens) in ("yes", "no") and (reason, error) == ("stop", None)


def test_the_callers_own_end_may_come_where_the_grammar_may_end() -> None:
    """Any letters may follow, so the grammar never ends by itself; nor does the model, which may not end."""
    (stop,) = VOCABULARY.tokenize_str("(")
    grammar = llguidance.LLMatcher.grammar_from_regex(r"[a-z]{2,200}")
    bias = {"logit_bias": {stop: 100.0}, "stop_token_ids": [stop]}
    with core_for(FOLDER, **SETTINGS) as core:
        tokens, reason, _ = run(core, [request("a", grammar, banned_token_ids=[EOS], **bias)])["a"]
    assert reason == "stop" and tokens[-1] == stop and len(VOCABULARY.decode_str(tokens[:-1])) >= 2


def test_a_grammar_that_cannot_be_built_ends_its_request_alone() -> None:
    with core_for(FOLDER, **SETTINGS) as core:
        found = run(core, [request("bad", "start: missing"), request("good", GRAMMARS[1]), request("free", "", max_tokens=5)])
    assert found["bad"][1] == "error" and "missing" in str(found["bad"][2]) and not found["bad"][0]
    assert found["good"][1] == "stop" and found["free"][1:] == ("length", None)


def test_a_grammar_that_takes_too_long_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_builds, "BUILD_SECONDS", -1.0)
    monkeypatch.setattr(grammar_builds.MatcherTemplates, "build", lambda *_, **__: time.sleep(0.5))
    with core_for(FOLDER, **SETTINGS) as core:
        found = run(core, [request("slow", GRAMMARS[0]), request("free", "", max_tokens=5)])
    assert "no grammar was built within" in str(found["slow"][2]) and found["free"][1:] == ("length", None)


def test_a_build_that_fails_in_an_unforeseen_way_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the tokenizer is gone")

    monkeypatch.setattr(grammar_builds.MatcherTemplates, "build", fail)
    with core_for(FOLDER, **SETTINGS) as core:
        found = run(core, [request("bad", GRAMMARS[0]), request("free", "", max_tokens=5)])
    assert found["bad"][1:] == ("error", "the tokenizer is gone") and found["free"][1:] == ("length", None)


def test_a_core_sleeps_while_a_grammar_is_built_and_is_woken() -> None:
    with core_for(FOLDER, **SETTINGS) as core:
        core.add(request("a", GRAMMARS[0]))
        assert core.scheduler.requests["a"].gates == {Gate.GRAMMAR}
        while Gate.GRAMMAR in core.scheduler.requests["a"].gates:
            turns = 0
            while not core.can_sleep:
                core.step()
                turns += 1
                assert turns < 5 or not core.scheduler.requests["a"].gates
            if Gate.GRAMMAR in core.scheduler.requests["a"].gates:
                assert select.select([core.wakeup.fd], [], [], 5.0)[0], "it would have slept for ever"
                core.step()
        while core.has_work:
            core.step()


def test_known_grammars_wait_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    build, released = grammar_builds.MatcherTemplates.build, threading.Event()

    def slow(templates: grammar_builds.MatcherTemplates, grammar: str) -> llguidance.LLMatcher:
        assert released.wait(30)
        return build(templates, grammar)

    with core_for(FOLDER, **SETTINGS) as core:
        assert run(core, [request("known", GRAMMARS[1])])["known"][1] == "stop"
        monkeypatch.setattr(grammar_builds.MatcherTemplates, "build", slow)
        for name in ("slow", "the same"):
            core.add(request(name, GRAMMARS[0]))
        core.add(request("quick", GRAMMARS[1]))
        while "quick" in core.scheduler.requests:
            core.step()
        assert core.scheduler.requests.keys() == {"slow", "the same"}
        core.abort("slow")  # the other one waits for the same build
        released.set()
        ends = [delta.finish_reason for _ in iter(lambda: core.has_work, False) for delta in core.step() if delta.finish_reason]
    assert ends == ["stop"]


def test_an_aborted_request_leaves_nothing_behind() -> None:
    with core_for(FOLDER, **SETTINGS) as core:
        core.add(request("a", GRAMMARS[0]))
        core.abort("a")
        assert not core.has_work and not core.scheduler._grammars._builds
        assert run(core, [request("a", GRAMMARS[1])])["a"][1] == "stop"


def test_guesses_of_drafts_obey_the_grammar(expected: dict[str, list[int]]) -> None:
    asked = [request(name, GRAMMARS[int(name[0])], int(name[1])) for name in expected]
    with core_for(FOLDER, **SETTINGS, speculative=SpeculativeConfig(method="ngram", prompt_lookup_min=1)) as core:
        found = run(core, asked)
    assert {name: tokens for name, (tokens, *_) in found.items()} == expected
