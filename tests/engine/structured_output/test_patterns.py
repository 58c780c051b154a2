"""Patterns are read as ECMA-262 says, or refused."""

import json

import pytest
from starling_engine.structured_output.patterns import UnsupportedPattern, all_but, translate

from tests.engine.structured_output.matching import Matcher


def accepts(pattern: str, text: str) -> bool:
    return Matcher({"type": "string", "pattern": pattern}).accepts_text(json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a", ["a", "xax"], ["", "b"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("(^a|^b)c$", ["ac", "bc"], ["xac", "acx"]),
        ("^.$", ["a", "é", "😀"], ["\n", "\u2028", "ab"]),
        (r"^\d$", ["7"], ["٣", "a"]),
        (r"^\w$", ["a", "_"], ["é", "-"]),
        (r"^\s$", [" ", "\u00a0", "\n"], ["\u0085", "\ufeff", "a"]),
        (r"^\S$", ["a", "é"], [" ", "\u0085", "\ufeff"]),
        (r"^[\s\S]$", ["\u0085", "\n", "a"], [""]),
        (r"^[\w-.]$", ["a", "-", "."], ["+"]),
        (r"^[a&&b]$", ["a", "&", "b"], ["c"]),
        (r"^[^a]$", ["b", "\n"], ["a", ""]),
        ("^[^]$", ["a"], [""]),
        (r"^\u0041\x42\u{43}\cJ$", ["ABC\n"], ["ABC"]),
        (r"^\ud83d\ude00$", ["😀"], ["a"]),
        (r"^\p{Lu}$", ["É"], ["é"]),
        ("^a{,3}$", ["a{,3}"], ["aaa"]),
        ("^a{2,3}?$", ["aa", "aaa"], ["a", "aaaa"]),
        (r"^\$\{x\}\/$", ["${x}/"], ["x"]),
        ("^(?<year>[0-9]{4})$", ["2024"], ["24"]),
        (r"^a\x00?b$", ["ab"], []),
        (r"^[\x00é]$", ["é"], [""]),
        (r"^[^\x01-\uffff]?$", [""], ["a"]),
    ],
)
def test_a_pattern_matches_as_ecma_262_says(pattern: str, matching: list[str], others: list[str]) -> None:
    assert [text for text in matching if not accepts(pattern, text)] == []
    assert [text for text in others if accepts(pattern, text)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        *("a**", "*", "{2}", "^*", "(?=a)", "(?<!a)b", "(?i)a", r"(a)\1", r"\bfoo", "x^y", "a$b", "(a$)*", "(^a|b$)c"),
        *("(", "a)", "[a", "[z-a]", "\\", r"\q", r"\ud800", "a{3,2}", "a{99999}", "a" * 2001, "(" * 60 + ")" * 60, r"\p"),
    ],
)
def test_a_pattern_that_cannot_be_said_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        translate(pattern)


def test_a_control_character_that_is_not_written_matches_nothing() -> None:
    assert not accepts(r"^[\x00-\x1f]?$", "a")
    assert accepts(r"^[\x00-\x1f]?$", "\n")


def test_all_strings_but_some_match() -> None:
    words = ["a", "ab", "b-"]
    assert [word for word in words if accepts(all_but(words), word)] == []
    assert [word for word in ("", "b", "abc", "b-x", "é", "\n") if not accepts(all_but(words), word)] == []
