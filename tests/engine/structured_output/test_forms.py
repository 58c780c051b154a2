"""Each form accepts what it says and nothing else, or is refused with its field; the library itself says what is accepted."""

import random
import re
import warnings
from itertools import product
from typing import Any

import pytest
from starling_engine.errors import InvalidRequest
from starling_engine.params import StructuredOutputsParams
from starling_engine.structured_output.forms import field_of

from tests.engine.structured_output.matching import CALL, END, THINK, UNTHINK, FormMatcher

Output = str | list[str | int]
INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def check(wanted: dict[str, Any], accepted: list[Output], refused: list[Output]) -> None:
    matcher = FormMatcher(**wanted)
    assert [output for output in accepted if not matcher.accepts(output)] == []
    assert [output for output in refused if matcher.accepts(output)] == []


def refusal(**wanted: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        FormMatcher(**wanted)
    return caught.value


@pytest.mark.parametrize("wanted", [{}, {"json_object": False}, {"json": {}, "regex": "a"}, {"choice": ["a"], "json_object": True}])
def test_exactly_one_form_is_wanted(wanted: dict[str, Any]) -> None:
    error = refusal(**wanted)
    assert error.param == "structured_outputs" and "exactly one of json, " in str(error)


def test_the_field_is_named() -> None:
    assert field_of(StructuredOutputsParams(regex="a", json_object=False)) == "structured_outputs.regex"


# ---- JSON ----


@pytest.mark.parametrize(
    ("wanted", "accepted", "refused"),
    [
        ({"json": INTEGERS}, ['{"a":1}', '{ "a" : 1 }'], ['{"a":1.5}', "{}", '{"a":1} ']),
        ({"json": '{"type": "integer", "x-guidance": {"lenient": true}}'}, ["1"], ["1.5", '"a"']),
        ({"json": True}, ["1", '"a"', "[{}]"], ["", "a"]),
        ({"json_object": True}, ["{}", '{"a": [1]}'], ["1", "[]", '{"a"}']),
        ({"json": INTEGERS, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', '{ "a":1}']),
        ({"json_object": True, "disable_any_whitespace": True}, ['{"a":[1,2]}'], ['{"a": 1}', '{"a":[1, 2]}']),
    ],
)
def test_json(wanted: dict[str, Any], accepted: list[Output], refused: list[Output]) -> None:
    check(wanted, accepted, refused)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "$: no value is valid"),
        ('{"type": "array", "contains": {"const": 1}}', "$.contains: "),
        ("{", "the text is not JSON"),
        ("[" * 100_000, "the text is nested too deeply"),
        ('{"const": 1' + "0" * 5_000 + "}", "the text is not JSON"),
        ("[]", "$: a schema has to be an object"),
        ({"const": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_schemas_that_are_refused(schema: Any, words: str) -> None:
    error = refusal(json=schema)
    assert words in str(error) and error.param == "structured_outputs.json"


# ---- choice ----


def test_a_choice_is_one_of_the_texts() -> None:
    odd = 'a\x00\x1f\x7f"\\/\b\f\n\r\t\u2028\uffff é😀 <thought> {} %json i'
    check({"choice": [odd, "ab", "abc", "i"]}, [odd, "ab", "abc", "i"], ["", "a", "abcd", "I", odd[:-1], [THINK], ["ab", CALL]])
    check({"choice": [""]}, [""], ["a"])
    check({"choice": ["yes", "", "yes"]}, ["yes", ""], ["ye"])


def test_choices_of_all_characters() -> None:
    draw = random.Random(3)
    texts = ["".join(chr(draw.choice([*range(256), 0x2029, 0xFFFD, 0x1F600])) for _ in range(6)) for _ in range(200)]
    check({"choice": texts}, list(texts), [text + "\x00" for text in texts])


def test_special_tokens_in_a_choice_are_tokens() -> None:
    accepted: list[Output] = ["ab", "abc", ["ab", CALL, "c"], [THINK], [CALL, CALL, "a", UNTHINK]]
    refused: list[Output] = ["", "a", "ab<call>c", "<think>", ["ab", CALL], ["abc", CALL, "c"], [CALL, "a", UNTHINK]]
    check({"choice": ["ab", "ab<call>c", "<think>", "abc", "<call><call>a</think>"]}, accepted, refused)
    check({"choice": ["<think>a</think>b"]}, [[THINK, "a", UNTHINK, "b"]], ["<think>a</think>b", "b"])


def test_choices_that_are_refused() -> None:
    assert "empty list" in str(refusal(choice=[]))
    error = refusal(choice=["a", "b<end>c"])
    assert "<end> ends the output" in str(error) and error.param == "structured_outputs.choice[1]"
    error = refusal(choice=["a", "\ud800"])
    assert "half of a surrogate pair" in str(error) and error.param == "structured_outputs.choice"


# ---- regex ----


@pytest.mark.parametrize(
    ("regex", "accepted", "refused"),
    [
        (r"\d{3}-\d{4}", ["555-0123"], ["555-01234", "x555-0123", "555-012"]),
        ("^ab$", ["ab"], ["^ab$", "abc", "xab"]),
        (r"ab\$", ["ab$"], ["ab", r"ab\$"]),
        (r"ab\\$", ["ab\\"], ["ab", "ab$"]),
        ("^a$|^b$", ["a", "b"], ["ab", "c"]),
        ("a|b", ["a", "b"], ["ab", ""]),
        ("", [""], ["a"]),
        ("https?://[^/]+/x", ["http://a.b/x"], ["http://a.b//x", "http:/a/x"]),
        (r"[/\]]+\/", ["/]/"], ["/", "a/"]),
        ("(?i)yes", ["YES", "yEs"], ["no"]),
        ("(?x) a # a letter\n b", ["ab"], ["a b", "a"]),
        ("a.c", ["abc", "aéc"], ["a\nc", "ac", ["a", CALL, "c"]]),
        ("(?s).*", ["", "a\nb</think>"], [[CALL], ["a", THINK]]),
        (r"[[:alpha:]&&[^b]]\p{Greek}", ["aα"], ["bα", "aa"]),
        ("a*?b", ["b", "aab"], ["a"]),
        ("[^ab]", ["c", "é"], ["a", "", [CALL]]),
    ],
)
def test_an_expression_is_matched_as_a_whole(regex: str, accepted: list[Output], refused: list[Output]) -> None:
    check({"regex": regex}, accepted, refused)


@pytest.mark.parametrize(
    "regex", ["a*+b", "a++", "a{2}{3}", "a?+", "(a+)*?+", "[[:alpha:]]+*", "[]a]*+", "[^]a]++", r"\[a*+", "a{2,}?{3}", "a" * 10_001]
)
def test_expressions_that_others_read_otherwise_are_refused(regex: str) -> None:
    assert refusal(regex=regex).param == "structured_outputs.regex"


@pytest.mark.parametrize("regex", ["(a*)+", r"a\*+", "[*+]+", "[]*+]", r"[\]*+]", "a{2}?", "(a{2}){3}", "[[a]*+]"])
def test_expressions_that_only_look_so_are_taken(regex: str) -> None:
    FormMatcher(regex=regex)


LOOKS = ["(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"\bab", r"a\Bb", "a^b", "a$b", "(a$)b", "(?m)^a$"]
OTHERS = [r"(a)\1", "(?P<n>a)(?P=n)", "(?>a)b", "(?#c)a", r"\Za", "(?-u:.)", r"(?-u)\xff", "a(b", "[", "\\"]


@pytest.mark.parametrize("regex", LOOKS + OTHERS)
def test_what_the_library_lacks_it_refuses(regex: str) -> None:
    with pytest.raises(AssertionError, match=r"invalid regex|lexer error"):
        FormMatcher(regex=regex)


def test_random_expressions_are_read_as_by_python() -> None:
    draw = random.Random(5)
    atoms = ["a", "b", "|", "^", "$", "(a", "(b", "(?:", ")", "[ab]", "a*", "b?", "a+", "b{2}", ".", "a*?", r"\A", "(^|a)", "(b|$)"]
    outputs = ["".join(letters) for length in range(4) for letters in product("abA", repeat=length)]
    taken = 0
    while taken < 150:
        regex = "".join(draw.choices(atoms, k=draw.randint(1, 6)))
        try:
            with warnings.catch_warnings(action="ignore"):
                expected = re.compile(regex)
            matcher = FormMatcher(regex=regex)
        except (re.error, AssertionError, InvalidRequest):
            continue
        taken += 1
        for output in outputs:
            assert matcher.accepts(output) == bool(expected.fullmatch(output)), (regex, output)


# ---- reasoning ----

BODIES: list[tuple[dict[str, Any], str, str]] = [
    ({"json": INTEGERS}, '{"a":1}', '{"a":"b"}'),
    ({"regex": "[a-z]+"}, "abc", "a1"),
    ({"choice": ["yes", "no"]}, "no", "maybe"),
    ({"grammar": 'start: "a" b\nb: %json {"type": "integer"}'}, "a1", "ax"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "x<call>"}}}, "", "x<call>"),
]


@pytest.mark.parametrize(("form", "right", "wrong"), BODIES)
def test_reasoning_may_come_first(form: dict[str, Any], right: str, wrong: str) -> None:
    body: list[str | int] = [right] if right else ["x", CALL]
    matcher = FormMatcher(**form, reasoning=True)
    accepted: list[list[str | int]] = [
        [],
        [THINK, UNTHINK],
        [THINK, "any {} \n text", UNTHINK, "\n\n"],
        [THINK, "<think>", UNTHINK, " \n\r\t" * 2],
    ]
    refused: list[list[str | int]] = [
        [THINK, "a"],
        [THINK, "</think>", UNTHINK],
        [UNTHINK],
        *([THINK, token, UNTHINK] for token in (THINK, CALL, END)),
        [THINK, UNTHINK, "\n" * 9],
    ]
    assert [thought for thought in accepted if not matcher.accepts([*thought, *body])] == []
    assert [thought for thought in refused if matcher.accepts([*thought, *body])] == []
    assert not any(matcher.accepts([*thought, wrong]) for thought in accepted)
    assert not any(matcher.accepts(thought) for thought in accepted)


def test_reasoning_that_the_prompt_has_opened_has_to_end() -> None:
    matcher = FormMatcher(choice=["yes"], reasoning=True, reasoning_open=True)
    assert matcher.accepts(["hm", UNTHINK, "\nyes"]) and matcher.accepts([UNTHINK, "yes"])
    assert not any(matcher.accepts(output) for output in ("yes", ["hm"], ["hm", UNTHINK], [THINK, "hm", UNTHINK, "yes"]))


def test_reasoning_needs_marks() -> None:
    error = refusal(choice=["yes"], reasoning=True, marks=None)
    assert error.param == "structured_outputs.reasoning" and "<think> </think>" in str(error)
