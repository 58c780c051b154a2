"""Matchers of grammars as constraints: their threads, their errors and their ends."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import pytest
from starling_engine.config import VocabularyConfig
from starling_engine.structured_output import matcher, templates
from starling_engine.structured_output.matcher import LIMITS, GrammarMatcher
from starling_engine.structured_output.templates import MatcherTemplates

from tests.engine.real_engine import MODEL
from tests.engine.structured_output.matching import TOKENIZER

WORDS = -(-TOKENIZER.vocab_size // 32)


def matcher_of(expression: str, kind: type[GrammarMatcher] = GrammarMatcher) -> GrammarMatcher:
    grammar = llguidance.LLMatcher.grammar_from_regex(expression)
    return kind(llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS), WORDS)


def test_a_fill_that_fails_waits_for_those_who_write_to_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    began, left, wrote = threading.Event(), threading.Event(), threading.Event()

    class Failing(GrammarMatcher):
        def _write(self, drafts: Sequence[int], address: int, size: int) -> None:
            if threading.current_thread() is threading.main_thread():
                assert began.wait(30)
                raise MemoryError
            began.set()
            left.wait(0.2)
            super()._write(drafts, address, size)
            wrote.set()

    monkeypatch.setattr(matcher, "_processors", lambda: 2)
    rows = [(matcher_of("[ab]*", Failing), (), nth) for nth in range(8)]
    with pytest.raises(MemoryError):
        GrammarMatcher.fill(rows, bytearray(4 * WORDS * len(rows)))
    left.set()
    assert wrote.is_set()


def test_few_masks_wake_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[int] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            submitted.append(1)
            return super().submit(*args, **kwargs)

    monkeypatch.setattr(matcher, "_processors", lambda: 64)
    with Pool(2) as pool:
        monkeypatch.setattr(matcher, "_threads", lambda: pool)
        for rows, others in ((1, 0), (4, 0), (5, 1), (9, 2)):
            submitted.clear()
            GrammarMatcher.fill([(matcher_of("[ab]*"), (), nth) for nth in range(rows)], bytearray(4 * WORDS * rows))
            assert len(submitted) == others


def test_an_output_that_ends_with_the_token_that_takes_the_last_of_its_budget_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, going_on = matcher_of("ab"), matcher_of("ab?c")
    monkeypatch.setattr(matcher, "USUAL_SECONDS", 0.0)
    monkeypatch.setattr(matcher, "BUDGET_SECONDS", 0.0)
    ending._matcher.consume_token(ord("a"))
    ending.advance(ord("b"))
    going_on.advance(ord("a"))
    assert ending.is_finished and ending.error is None
    assert not going_on.is_finished and "processor time" in str(going_on.error)


def test_nothing_is_forced_and_no_draft_allowed_behind_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = matcher_of("abcd")
    assert list(failed.forced(9)) == [*b"abcd"] and failed.allowed([*b"abcd"]) == 4
    monkeypatch.setattr(matcher, "USUAL_SECONDS", 0.0)
    monkeypatch.setattr(matcher, "BUDGET_SECONDS", 0.0)
    failed.advance(ord("a"))
    assert failed.error is not None and not failed.forced(9) and not failed.allowed([*b"bcd"])


def test_an_output_that_is_taken_again_has_a_budget_too() -> None:
    grammar = llguidance.LLMatcher.grammar_from_lark("start: s\ns: s s | /[a-z]/")
    ambiguous = GrammarMatcher(llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS), WORDS)
    ambiguous.replay(b"a" * 600)
    assert "0.5 s of processor time" in str(ambiguous.error)


@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1000), (100, 30)])
def test_templates_used_last_are_kept_within_a_number_and_bytes(
    most: int, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_TEMPLATES", most)
    monkeypatch.setattr(templates, "MAX_GRAMMAR_BYTES", most_bytes)
    kept = MatcherTemplates(VocabularyConfig(MODEL, 4096, (2,)))
    template = kept.build(llguidance.LLMatcher.grammar_from_regex("[ab]*"))
    grammars = [f"grammar {number}" for number in range(6)]
    for grammar in grammars:
        kept.add(grammar, template)
        assert kept.find(grammars[0]) is template, "it is used again and again"
    assert [grammar for grammar in grammars if kept.find(grammar) is not None] == [grammars[0], *grammars[-2:]]
