"""Forms made to exhaust a server: each is answered, or refused with a reason, within half a second of processor time."""

import random
import time
from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from starling_engine.errors import InvalidRequest
from starling_engine.structured_output import rewrite
from starling_engine.structured_output.matcher import LIMITS, USUAL_SECONDS, GrammarMatcher
from starling_engine.structured_output.trial import UnusableGrammar, try_grammar

from tests.engine.structured_output.matching import TOKENIZER

LIMIT = 0.5
"""Seconds."""
SLOW = 20
"""Factor by which a processor may be slower than usual. A rewrite without a bound takes minutes."""


def _nested(keyword: str, depth: int, inner: Any, as_list: bool = False) -> Any:
    for _ in range(depth):
        inner = {keyword: [inner] if as_list else inner}
    return inner


def _chain(length: int, made: Callable[[str], Any]) -> dict[str, Any]:
    return {"$ref": "#/$defs/0", "$defs": {str(at): made(f"#/$defs/{at + 1}") for at in range(length)} | {str(length): {}}}


def _looping(schema: Any) -> dict[str, Any]:
    return {"$ref": "#/$defs/a", "$defs": {"a": schema}}


def _tagged(count: int) -> list[dict[str, Any]]:
    return [{"type": "object", "properties": {"kind": {"const": f"k{at}"}}, "required": ["kind"]} for at in range(count)]


A = {"$ref": "#/$defs/a"}
HOSTILE: dict[str, Any] = {
    "5000 levels": _nested("items", 5_000, {}),
    "500 levels": _nested("items", 500, {}),
    "90 levels": _nested("items", 90, {}),
    "90 levels of not": _nested("not", 90, {"type": "string"}),
    "45 levels of allOf": _nested("allOf", 45, {"type": "string"}, as_list=True),
    "an enum of 1e5 words": {"enum": [f"w{at}" for at in range(100_000)]},
    "an enum of 7000 words": {"enum": [f"word{at}" for at in range(7_000)]},
    "a remote reference": {"$ref": "https://example.com/schema"},
    "a file": {"$ref": "file:///etc/passwd"},
    "a lookahead": {"type": "string", "pattern": "^(?=a)b"},
    "10000 brackets": {"type": "string", "pattern": "(" * 10_000 + "a" + ")" * 10_000},
    "20000 optional letters": {"type": "string", "pattern": "a?" * 20_000},
    "900 optional letters": {"type": "string", "pattern": "a?" * 900},
    "repetitions of repetitions": {"type": "string", "pattern": "((((a{1000}){1000}){1000}){1000}){1000}"},
    "endless repetitions": {"type": "string", "pattern": "a{99999999999999999999}"},
    "an unknown keyword": {"type": "string", "maximumLength": 5},
    "lenient for all": {"x-guidance": {"lenient": True}, "type": "array", "contains": {"const": 1}},
    "a million digits": {"const": 10**1_000_000},
    "an exponent": {"minimum": 1e308, "multipleOf": 1e-300},
    "a multiple without end": {"multipleOf": 5e-324},
    "NaN": {"minimum": float("nan")},
    "half a surrogate": {"const": "\ud800"},
    "a reference to itself": {"$ref": "#"},
    "a definition that is itself": _looping(A),
    "two references to itself": _looping({"allOf": [A, A]}),
    "a choice of itself": _looping({"anyOf": [A, A, A, {"type": "null"}]}),
    "the opposite of itself": _looping({"not": A}),
    "one of itself": _looping({"oneOf": [A, A, {"type": "null"}]}),
    "a condition on itself": _looping({"if": A, "then": A, "else": {"type": "null"}}),
    "an endless tree": _looping({"type": "object", "properties": {"x": A}, "required": ["x"]}),
    "3000 definitions in a chain": _chain(3_000, lambda ref: {"items": {"$ref": ref}}),
    "1000 definitions in place": _chain(1_000, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]}),
    "doubling references": _chain(40, lambda ref: {"oneOf": [{"$ref": ref}, {"not": {"$ref": ref}}]}),
    "doubling negations": {"not": _chain(40, lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": ref}]})},
    "100 tagged branches": {"oneOf": _tagged(100)},
    "1000 tagged branches": {"oneOf": _tagged(1_000)},
    "branches of branches": {"oneOf": [{"anyOf": _tagged(40)} for _ in range(40)]},
    "60 dependencies": {"dependentRequired": {f"p{at}": [f"p{at + 1}"] for at in range(60)}},
    "nested conditions": _nested("if", 40, {"const": 1}) | {"then": {"type": "string"}},
    "different items of many values": {"type": "array", "items": {"enum": list(range(1_000))}, "uniqueItems": True},
    "different large items": {"type": "array", "items": {"enum": ["x" * 9_000 + str(at) for at in range(5)]}, "uniqueItems": True},
    "half of 100 properties": {
        "properties": {f"p{at}": {} for at in range(100)},
        "additionalProperties": False,
        "minProperties": 50,
    },
    "contained in a billion": {"contains": {"const": 1}, "maxItems": 10**9},
    "5000 anchors": {"$defs": {str(at): {"$anchor": f"a{at}"} for at in range(4_000)}, "$ref": "#a3999"},
    "many identities": {"$defs": {str(at): {"$id": f"https://e.com/{at}"} for at in range(3_000)}, "$ref": "https://e.com/7"},
    "excluded words": {"not": {"enum": ["a" * 1_000, "b" * 2_000]}},
    "many excluded words": {"type": "string", "not": {"enum": [f"w{at}" for at in range(2_000)]}},
    "3000 patterns": {"patternProperties": {f"^p{at}$": {} for at in range(3_000)}},
    "no schema": [],
    "a type of nothing": {"type": []},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_answered_or_refused_in_time(name: str) -> None:
    started = time.process_time()
    try:
        rewrite(HOSTILE[name])
    except InvalidRequest as refusal:
        assert str(refusal).startswith("$")
    assert time.process_time() - started < SLOW * LIMIT


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("5000 levels", "nested more than 100 levels"),
        ("an enum of 1e5 words", "characters; 100000 are possible"),
        ("a remote reference", "others are not fetched"),
        ("a file", "others are not fetched"),
        ("20000 optional letters", "2000 are possible"),
        ("lenient for all", "$.contains"),
        ("a million digits", "too many digits"),
        ("NaN", "NaN"),
        ("a reference to itself", "leads back to itself"),
        ("an unknown keyword", "$.maximumLength"),
        ("1000 tagged branches", "steps"),
        ("different large items", "characters to be rewritten"),
        ("half of 100 properties", "64 choices"),
    ],
)
def test_the_refusal_says_which_limit_was_met(name: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        rewrite(HOSTILE[name])
    assert reason in str(refusal.value)


WORDS = -(-TOKENIZER.vocab_size // 32)
AMBIGUOUS = {
    "letters in any grouping": "start: s\ns: s s | /[a-z]/",
    "words of words": """start: e\ne: e e | e "a" e | "b" e "c" | /[a-z]{1,30}/ | /[a-z ]{1,20}/ | "x" | /.{1,3}/""",
}
"""Grammars that begin cheaply, and of which each token takes longer than the one before."""


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_grammar_that_gets_ever_slower_ends_its_output(name: str) -> None:
    """A neighbour in the same steps goes on: it is not charged for what another row takes."""
    grammar = llguidance.LLMatcher.grammar_from_lark(AMBIGUOUS[name])
    try_grammar(grammar, TOKENIZER)
    hostile, usual = (_matcher(one) for one in (grammar, llguidance.LLMatcher.grammar_from_regex("[a-z]*")))
    letters, length, started = random.Random(1), 0, time.process_time()
    while hostile.error is None:
        bits = bytearray(b"\xff") * (8 * WORDS)
        GrammarMatcher.fill([(hostile, (), 0), (usual, (), 1)], bits)
        hostile.advance(letters.choice([byte for byte in range(256) if bits[byte // 8] >> byte % 8 & 1]))
        usual.advance(ord("a"))
        length += 1
    assert time.process_time() - started < LIMIT + 0.2 + 4 * length * USUAL_SECONDS
    assert "0.5 s of processor time" in hostile.error and usual.error is None


@pytest.mark.parametrize("begins", ["", '("b" | "c") '])
def test_a_grammar_whose_next_step_is_slow_is_refused(begins: str) -> None:
    """What is forced is found at once, in a call of the library that lets no other thread of a core run."""
    with pytest.raises(UnusableGrammar, match="a step takes more than"):
        try_grammar(llguidance.LLMatcher.grammar_from_lark(f'start: {begins}"{"lorem ipsum " * 20_000}"'), TOKENIZER)


def _matcher(grammar: str) -> GrammarMatcher:
    return GrammarMatcher(llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS), WORDS)
