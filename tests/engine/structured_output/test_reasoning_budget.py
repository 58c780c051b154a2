"""Limits of reasoning, alone and beside a grammar."""

import random

import llguidance
import msgspec
import pytest
from starling_engine.constraint import MaskRow
from starling_engine.params import StructuredOutputsParams
from starling_engine.request import ReasoningLimit
from starling_engine.structured_output.forms import grammar_of
from starling_engine.structured_output.matcher import GrammarMatcher
from starling_engine.structured_output.output_constraint import OutputConstraint
from starling_engine.structured_output.reasoning_budget import ReasoningBudget
from starling_engine.structured_output.special_tokens import ReasoningMarks

from tests.engine.structured_output.matching import CALL, MARKS, THINK, TOKENIZER, TOKENS, UNTHINK, FormMatcher

WORDS = 9
ALL = (1 << 32 * WORDS) - 1
ONLY_END = 1 << UNTHINK


ONE_TOKEN = ReasoningLimit((THINK,), (UNTHINK,), 0, False)
SEVERAL = ReasoningLimit((THINK, 97, CALL), (UNTHINK, 97, CALL), 0, False, ((66,), (67, 68)))


def possible(output: list[int], limit: ReasoningLimit) -> list[int]:
    """Returns the tokens of which one has to follow, none where any may, by looking through all of the output."""
    rest, is_open, left, since = output, limit.is_open, limit.tokens, [-1]
    while True:
        mark = list(limit.ends if is_open else limit.opens)
        if rest[: len(mark)] == mark:
            since = [] if is_open and left < len(mark) else [-1]
            rest, is_open = rest[len(mark) :], not is_open
        elif rest == mark[: len(rest)]:
            break
        else:
            since = [*since, rest[0]]
            rest, left = rest[1:], left - is_open
    since = [*since, *rest]
    if len(since) < len(limit.then) and all(token in step for token, step in zip(since, limit.then, strict=False)):
        return list(limit.then[len(since)])
    return [mark[len(rest)]] if is_open and left <= len(rest) else []


@pytest.mark.parametrize("marks", [ONE_TOKEN, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("seed", range(40))
def test_masks_are_those_of_a_reader_of_the_whole_output(seed: int, marks: ReasoningLimit) -> None:
    """Drafts included, wherever the output was taken up again; a row that is said to be free has nothing masked."""
    rng = random.Random(seed)
    limit = msgspec.structs.replace(marks, tokens=rng.randint(0, 6), is_open=rng.random() < 0.5)
    output: list[int] = []
    constraint = OutputConstraint(WORDS, None, ReasoningBudget(limit))
    written = [65, 66, 67, 97, THINK, UNTHINK, CALL]
    for _ in range(20):
        if rng.random() < 0.2:
            constraint = OutputConstraint(WORDS, None, ReasoningBudget(limit, output))
        drafts = rng.choices(written, [8, 2, 2, 3, 2, 1, 3], k=rng.randint(0, 3))
        wanted = [possible([*output, *drafts[:count]], limit) for count in range(len(drafts) + 1)]
        first = next((at for at, token in enumerate(drafts) if wanted[at] and token not in wanted[at]), len(drafts))
        bits = bytearray(b"\xff" * (4 * WORDS * (len(drafts) + 2)))
        constraint.fill([MaskRow(constraint, drafts, 1)], bits)
        masks = [int.from_bytes(bits[at : at + 4 * WORDS], "little") for at in range(0, len(bits), 4 * WORDS)]
        assert masks[0] == ALL
        assert masks[1 : first + 2] == [sum(1 << token for token in tokens) or ALL for tokens in wanted[: first + 1]]
        assert constraint.allowed(drafts) == first
        assert constraint.restricts(1 + len(drafts)) or not any(wanted)
        forced: list[int] = []
        while len(forced) < 3 and len(following := possible([*output, *forced], limit)) == 1:
            forced += following
        assert constraint.forced(3) == forced
        token = rng.choice(wanted[0] or written)
        constraint.advance(token)
        output.append(token)
    assert not constraint.is_finished and constraint.error is None


def test_marks_are_found_in_words_and_tokens() -> None:
    """Looks at gpt-oss's, which has a header behind reasoning, and at Kimi K3's, which are pieces alone."""
    words = {"analysis": [35644], "assistant": [173781], "final": [17196], "commentary": [12606, 815], "think": [7, 8]}
    added = {"<|start|>": 1, "<|end|>": 2, "<|channel|>": 3, "<|message|>": 4}
    found = ReasoningMarks.find(added, words.__getitem__)
    assert found is not None
    assert (found.opens, found.ends) == ([3, 35644, 4], [2])
    assert found.then == [[1], [173781], [3], [17196, 12606]]
    history = [*found.opens, 65, 2, 1, 173781]
    assert not found.have_opened(history, frozenset()) and found.have_opened([*history, *found.opens, 65], frozenset())
    kimi = ReasoningMarks.find({"<|open|>": 1, "<|close|>": 2, "<|sep|>": 3}, words.__getitem__)
    assert kimi is not None and (kimi.opens, kimi.ends, kimi.then) == ([1, 7, 8, 3], [2, 7, 8, 3], [])
    assert kimi.have_opened([1, 7, 8, 3, 65], frozenset()) and not kimi.have_opened([1, 7, 8, 3, 65, 2, 7, 8, 3, 1], frozenset())
    assert ReasoningMarks.find({"<|open|>": 1, "<|sep|>": 3}, words.__getitem__) is None


def pieces(*parts: str) -> list[str | int]:
    """Returns an output of texts and of those tokens that the marks below are."""
    return [{"T": THINK, "U": UNTHINK, "C": CALL}.get(part, part) for part in parts]


GEMMA = {"<|channel>": THINK, "<channel|>": UNTHINK}
GPT_OSS = {"<|channel|>": THINK, "<|end|>": UNTHINK, "<|message|>": CALL, "<|start|>": CALL}
KIMI = {"<|open|>": THINK, "<|close|>": UNTHINK, "<|sep|>": CALL}
GPT_OSS_THOUGHT = ("T", "analysis", "C", "hm", "U", "C", "assistant")


@pytest.mark.parametrize(
    ("added", "is_open", "right", "wrong"),
    [
        (GEMMA, False, [["yes"], ["T", "thought\nhm", "U", "\nyes"]], [["T", "hm", "U", "yes"], ["T", "thought\nhm", "U", "no"]]),
        (
            GPT_OSS,
            False,
            [["T", "final", "C", "yes"], [*GPT_OSS_THOUGHT, "T", "final", "C", "yes"]],
            [["yes"], [*GPT_OSS_THOUGHT, "yes"], [*GPT_OSS_THOUGHT, "T", "final", "C", "no"], ["T", "analysis", "C", "yes"]],
        ),
        (KIMI, False, [["yes"], ["T", "think", "C", "hm", "U", "think", "C", "T", "response", "C", "yes"]], [["T", "yes"]]),
        (KIMI, True, [["hm", "U", "think", "C", "T", "response", "C", "yes"]], [["yes"], ["hm", "U", "think", "C", "yes"]]),
    ],
)  # fmt: skip
def test_an_answer_with_a_form_may_reason_first_in_formats_of_several_marks(
    added: dict[str, int], is_open: bool, right: list[list[str]], wrong: list[list[str]]
) -> None:
    marks = ReasoningMarks.find(added, lambda text: [*text.encode()])
    form = FormMatcher(choice=["yes"], reasoning=True, marks=marks, reasoning_open=is_open)
    for parts in right:
        assert form.accepts(pieces(*parts)), parts
    for parts in wrong:
        assert not form.accepts(pieces(*parts)), parts


def test_a_form_of_calls_has_its_own_headers() -> None:
    marks = ReasoningMarks.find(GPT_OSS, lambda text: [*text.encode()])
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "<call>f"}}
    form = FormMatcher(structural_tag=tag, reasoning=True, marks=marks)
    for parts in (["C", "f"], [*GPT_OSS_THOUGHT, "C", "f"]):
        assert form.accepts(pieces(*parts)), parts
    assert not form.accepts(pieces("T", "final", "C", "C", "f"))


@pytest.mark.parametrize("budget", [0, 2])
def test_several_tokens_end_reasoning_before_a_form(budget: int) -> None:
    """Follows gpt-oss's marks, whose budget goes on in the answer's header, up to the form."""
    marks = ReasoningMarks.find(GPT_OSS, lambda text: [*text.encode()])
    assert marks is not None
    form = StructuredOutputsParams(choice=["yes"], reasoning=True)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar_of(form, TOKENS, marks), log_level=0)
    limit = ReasoningLimit(marks.opens, marks.ends, budget, False, marks.then)
    constraint = OutputConstraint(WORDS, GrammarMatcher(matcher, WORDS), ReasoningBudget(limit))
    for token in (*marks.opens, *b"hm"[:budget]):
        constraint.advance(token)
    for token in (UNTHINK, CALL, *b"assistant", THINK, *b"final", CALL, *b"yes"):
        bits = bytearray(b"\xff" * 4 * WORDS)
        constraint.fill([MaskRow(constraint, [], 0)], bits)
        assert int.from_bytes(bits, "little") == 1 << token
        constraint.advance(token)
    assert constraint.error is None


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
    assert ReasoningBudget(ReasoningLimit((THINK,), (UNTHINK,), left, is_open)).restricts(tokens) == restricts


def test_reasoning_before_a_form_ends_with_its_budget_and_the_form_follows() -> None:
    form = StructuredOutputsParams(choice=["yes"], reasoning=True)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar_of(form, TOKENS, MARKS, reasoning_open=True), log_level=0)
    limit = ReasoningLimit((THINK,), (UNTHINK,), 2, is_open=True)
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
    budget = ReasoningBudget(ReasoningLimit((THINK,), (UNTHINK,), 0, is_open=False))
    constraint = OutputConstraint(WORDS, GrammarMatcher(matcher, WORDS), budget)
    for token in (THINK, *b"abc", UNTHINK):
        bits = bytearray(b"\xff" * 4 * WORDS)
        constraint.fill([MaskRow(constraint, [], 0)], bits)
        assert int.from_bytes(bits, "little") == 1 << token
        constraint.advance(token)
    assert constraint.error is None
