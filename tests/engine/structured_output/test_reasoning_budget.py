"""Limits of reasoning, alone and beside a grammar."""

import random

import llguidance
import pytest
from starling_engine.constraint import MaskRow
from starling_engine.params import StructuredOutputsParams
from starling_engine.request import ReasoningLimit
from starling_engine.structured_output.forms import grammar_of
from starling_engine.structured_output.matcher import GrammarMatcher
from starling_engine.structured_output.output_constraint import OutputConstraint
from starling_engine.structured_output.reasoning_budget import ReasoningBudget

from tests.engine.structured_output.matching import MARKS, THINK, TOKENIZER, TOKENS, UNTHINK

WORDS = 9
ALL = (1 << 32 * WORDS) - 1
ONLY_END = 1 << UNTHINK


def has_to_end(output: list[int], tokens: int, *, is_open: bool) -> bool:
    """Says so by looking through all of the output."""
    used = 0
    for token in output:
        if token in (THINK, UNTHINK) and is_open == (token == UNTHINK):
            is_open = not is_open
        else:
            used += is_open
    return is_open and used >= tokens


@pytest.mark.parametrize("seed", range(40))
def test_masks_are_those_of_a_reader_of_the_whole_output(seed: int) -> None:
    """Drafts included, wherever the output was taken up again; a row that is said to be free has nothing masked."""
    rng = random.Random(seed)
    is_open, tokens = rng.random() < 0.5, rng.randint(0, 6)
    limit = ReasoningLimit(THINK, UNTHINK, tokens, is_open)
    output: list[int] = []
    constraint = OutputConstraint(WORDS, None, ReasoningBudget(limit))
    for _ in range(20):
        if rng.random() < 0.2:
            constraint = OutputConstraint(WORDS, None, ReasoningBudget(limit, output))
        drafts = rng.choices([65, 66, THINK, UNTHINK], [8, 8, 1, 1], k=rng.randint(0, 3))
        wanted = [has_to_end([*output, *drafts[:count]], tokens, is_open=is_open) for count in range(len(drafts) + 1)]
        bits = bytearray(b"\xff" * (4 * WORDS * (len(drafts) + 2)))
        constraint.fill([MaskRow(constraint, drafts, 1)], bits)
        masks = [int.from_bytes(bits[at : at + 4 * WORDS], "little") for at in range(0, len(bits), 4 * WORDS)]
        first = wanted.index(True) if True in wanted else len(wanted)
        assert masks[: 1 + first] == [ALL] * (1 + first)
        assert masks[1 + first : 2 + first] in ([], [ONLY_END])
        assert constraint.allowed(drafts) == min(first, len(drafts))
        assert constraint.restricts(1 + len(drafts)) or not any(wanted)
        token = UNTHINK if wanted[0] else rng.choices([65, THINK, UNTHINK], [8, 1, 1])[0]
        constraint.advance(token)
        output.append(token)
    assert not constraint.is_finished and constraint.error is None and not constraint.forced(3)


@pytest.mark.parametrize(
    ("is_open", "left", "tokens", "restricts"),
    [
        (True, 5, 5, False),
        (True, 5, 6, True),
        (True, 0, 1, True),
        (False, 0, 1, False),
        (False, 0, 2, True),
        (False, 5, 6, False),
        (False, 5, 7, True),
    ],
)
def test_rows_out_of_reach_wait_for_no_mask(is_open: bool, left: int, tokens: int, restricts: bool) -> None:
    assert ReasoningBudget(ReasoningLimit(THINK, UNTHINK, left, is_open)).restricts(tokens) == restricts


def test_reasoning_before_a_form_ends_with_its_budget_and_the_form_follows() -> None:
    form = StructuredOutputsParams(choice=["yes"], reasoning=True)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar_of(form, TOKENS, MARKS, reasoning_open=True), log_level=0)
    limit = ReasoningLimit(THINK, UNTHINK, 2, is_open=True)
    constraint = OutputConstraint(WORDS, GrammarMatcher(matcher, WORDS), ReasoningBudget(limit))

    def mask() -> int:
        bits = bytearray(b"\xff" * 4 * WORDS)
        constraint.fill([MaskRow(constraint, [], 0)], bits)
        return int.from_bytes(bits, "little")

    assert constraint.restricts(1)
    for token in b"hm":
        assert mask().bit_count() > 1
        constraint.advance(token)
    assert mask() == ONLY_END
    assert constraint.allowed([*b"so"]) == 0
    constraint.advance(UNTHINK)
    assert mask() & 1 << ord("y") and not mask() & 1 << ord("n")
    for token in b"yes":
        constraint.advance(token)
    assert constraint.is_finished or mask().bit_count() == 1


def test_a_grammar_that_cannot_end_reasoning_there_wins() -> None:
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(f'start: <[{THINK}]> "abc" <[{UNTHINK}]>'))
    budget = ReasoningBudget(ReasoningLimit(THINK, UNTHINK, 0, is_open=False))
    constraint = OutputConstraint(WORDS, GrammarMatcher(matcher, WORDS), budget)
    for token in (THINK, *b"abc", UNTHINK):
        bits = bytearray(b"\xff" * 4 * WORDS)
        constraint.fill([MaskRow(constraint, [], 0)], bits)
        assert int.from_bytes(bits, "little") == 1 << token
        constraint.advance(token)
    assert constraint.error is None
