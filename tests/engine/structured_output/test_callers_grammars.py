"""Grammars of callers: what they say is enforced, and nothing in them can switch that off."""

import json
from typing import Any

import llguidance
import pytest
from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.callers_grammar import enforced_lark

from tests.engine.structured_output.matching import CALL, END, THINK, TOKENIZER, TOKENS, FormMatcher

Output = str | list[str | int]
PROPERTIES = '{"a": {"type": "integer", "title": "A"}}'
INTEGERS = f'{{"type": "object", "properties": {PROPERTIES}, "required": ["a"], "additionalProperties": false}}'
LENIENT = '{"x-guidance": {"lenient": true}, "type": "array", "contains": {"const": 1}}'


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        ('start: "a" | b\nb: "b" "c"*', ["a", "b", "bcc"], ["", "ab", "c"]),
        ('start: A\nA: "a"i /b+/i "é"', ["aBé", "Abbé"], ["é", "ab"]),
        ("start: /a//b/ /[\\/]/", ["ab/"], ["a/b/", "ab"]),
        (f'start: "a" %json {INTEGERS} "z"', ['a{"a":1}z', 'a{ "a" : 1 }z'], ['a{"a":1.5}z', 'a{"a":1} z', "a{}z"]),
        ('start: %json\n\t{"const": "100% %json {} %llguidance"}', ['"100% %json {} %llguidance"'], ['"100"']),
        ('start: %json {"type": "integer"} | "none"', ["1", "none"], ["", "1.5", "non"]),
        ("start: %json true", ["1", "{}"], [""]),
        ('%import common.INT\n%ignore " "\nstart: INT "+" INT', ["1+2", "1 + 2"], ["1+", "1 2"]),
        ('%llguidance {}\nstart: "a" # "b"\n | "d" // | "c"', ["a", "d"], ["b", "c"]),
        ('start: %regex {"substring_chars": "abc"}', ["ab", "bc", ""], ["ac"]),
        ('start: a "y"\na[suffix="x"]: /[a-z]+/', ["abxy"], ["aby"]),
        ('start: a "b"\na[capture="it", lazy]: /.*x/', ["aaxb"], ["axaxb", "b"]),
        ("start: X\nX: /[a-z]+/ & /.*b.*/", ["abc"], ["aaa", "b1"]),
        ('start: "a"~2..3 "b" ~ 2', ["aabb"], ["abb", "aab"]),
        ('start: p::0x0\np::_: "" %if is_ones([0:2])\n | "a" p::set_bit(0) %if bit_clear(0)\n | "b" p::set_bit(1) %if bit_clear(1)',
         ["ab", "ba"], ["a", "aa", "abb"]),
        ('start: <call> "a" | "b"', [[CALL, "a"], "b"], ["<call>a", "a", [THINK, "a"]]),
        # GBNF
        ('root ::= "yes" | "no" [0-9]+ # or not\n', ["yes", "no12"], ["no", "ye"]),
        ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"', ["1+(2+3)", "7"], ["1+", "(1"]),
        ('root ::= [^\\n/\\]]{2,3} "\\n"\n', ["ab\n", "abc\n"], ["a\n", "a/\n", "ab"]),
        ('root ::= "a\\x41" " "?', ["aA", "aA "], ["aa"]),
    ],
)  # fmt: skip
def test_a_grammar_is_enforced(grammar: str, accepted: list[Output], refused: list[Output]) -> None:
    matcher = FormMatcher(grammar=grammar)
    assert [output for output in accepted if not matcher.accepts(output)] == []
    assert [output for output in refused if matcher.accepts(output)] == []


def test_json_in_a_grammar_has_no_white_space_if_none_is_wanted() -> None:
    matcher = FormMatcher(grammar=f"start: %json {INTEGERS}", disable_any_whitespace=True)
    assert matcher.accepts('{"a":1}') and not matcher.accepts('{"a": 1}')


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (f"start: %json {LENIENT}", "the schema of %json, line 1, $.contains"),
        ('start: a\na: "b" %json {"maximumLength": 5}', "line 2, $.maximumLength"),
        ("start: %json false", "no value is valid"),
        ("start: %json {'a': 1}", "no JSON follows"),
        ('start: %json {"a": 1', "no JSON follows"),
        ("start: %json " + "[" * 90_000, "nested too deeply"),
        ('start: "a"\n// %json {}', "line 2: %json is not possible in a comment"),
        ('start: "%json {}"', "%json is not possible in a comment, a string"),
        ("start: /%json/", "%json is not possible in"),
        ("start: <%json>", "%json is not possible in"),
        ('start: "a" # %llguidance {"allow_invalid_utf8": true}', "%llguidance is not possible in"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "options that are not possible"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "options that are not possible"),
        ('start: %lark { start: "a" }', "%lark is not possible"),
        ('%declare X\nstart: "a"', "%declare is not possible"),
        ("start: %jsonx", "%jsonx is not possible"),
        ("start: a\na[max_tokens=3]: /[a-z]+/", "line 2: max_tokens= is not possible"),
        ('start: a\na[capture="q", lazy, stop = "x"]: /[a-z]+/', "stop= is not possible"),
        ("start: a\na[temperature=0.5]: /[a-z]+/", "temperature= is not possible"),
        ('start: X "end"\nX: ~/abc/', "~ is not possible"),
        ('start: X "end"\nX: ~ (/abc/ | "x")', "~ is not possible"),
        ("start: @other", "no other grammars"),
        ("start: <[257]>", "by name, not by number"),
        ("start: <[*]>", "by name, not by number"),
        ('start: "a" <end> "b"', "<end> ends the output"),
        (' {"grammars": [{"lark_grammar": "start: /.*/"}]}', "not JSON"),
        ('start: "a" ; "b"', "is not Lark"),
        ("root ::= nope", "Rule 'nope' not found"),
        ("root ::= [a&&b]", "an operation of sets"),
        ("root ::= [+--]", "an operation of sets"),
        ("root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000, "recursion"),
        ('root ::= "%json {}"', "%json is not possible in"),
        ('root ::= "a" # %json {}', "%json is not possible in"),
        ('start: "\ud800"', "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_what_would_not_be_enforced_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FormMatcher(grammar=grammar)
    assert words in str(caught.value) and caught.value.param == "structured_outputs.grammar"


def test_no_text_in_a_schema_can_be_read_as_a_directive() -> None:
    grammar = 'start: %json {"const": "%json {}"}\na: %regex {"substring_chars": "%json"}'
    written = enforced_lark(grammar, "grammar", TOKENS, lambda schema, _: schema)
    assert written.count("%") == 2 and written.count("\\u0025json") == 2


def test_opposites_would_have_special_tokens() -> None:
    """The library's own reading, because of which `~` is refused: the end of an output is a text that is not abc."""

    def possible(terminal: str) -> bool:
        grammar: dict[str, Any] = {"grammars": [{"lark_grammar": f'start: X "end"\nX: {terminal}'}]}
        mask = llguidance.LLMatcher(TOKENIZER, json.dumps(grammar), log_level=0).compute_bitmask()
        return bool(mask[END // 8] >> END % 8 & 1)

    assert possible("~/abc/") and not possible("/(?s:.*)/ & ~/abc/")
