"""Grammars of texts that stand in a JSON string: what they let a model write is what JSON writes of the texts of the grammar."""

import json
from typing import Any

import pytest
from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.json_expressions import in_json
from starling_engine.structured_output.json_lark import COMMON

from tests.engine.structured_output.matching import FormMatcher

PIECES = ("", "a", "B", "1", " ", "é", "-", "'", "/", '"', "\\", "\n", "\r", "\t", "\b", "\f", "^", "]")
TEXTS = [first + second for first in PIECES for second in PIECES] + ["a\n\nb", 'a"b"c', '"a\\"b"', "a \n a", "aaa", '"""']
PATCHES = """
start: head part+ tail
head: "*** Begin Patch" LF
tail: "*** End Patch" LF?

part: added | removed | changed
added: "*** Add File: " path LF added_line+
removed: "*** Delete File: " path LF
changed: "*** Update File: " path LF moved? change?

path: /(.+)/
added_line: "+" /(.*)/ LF -> line

moved: "*** Move to: " path LF
change: (place | line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""
SUMS = """
start: sum
sum: product (SP ADD SP product)* -> add
    | product
product: value (SP MUL SP value)* -> mul
    | value
value: INT | "(" sum ")"
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""


def form(grammar: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "json_string", "grammar": grammar, **fields}}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (
            PATCHES,
            [
                '*** Begin Patch\n*** Add File: a"b\\.py\n+x = "\\n"\n+\n*** End Patch',
                "*** Begin Patch\n*** Update File: é\n*** Move to: b\n@@ f\n-\ta\n+b\n c\n@@\n*** End of File\n*** End Patch\n",
                "*** Begin Patch\n*** Delete File: a\n*** Delete File: b\n*** End Patch\n",
            ],
            [
                "",
                "*** Begin Patch\n*** End Patch",
                "*** Begin Patch\n*** Add File: a\n*** End Patch",
                "*** Begin Patch\n*** Add File: a\n-x\n*** End Patch",
                "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch\n\n",
                "*** Begin Patch *** Delete File: a\n*** End Patch",
            ],
        ),
        (SUMS, ["1", "1 + 2 * 33", "(1 + 2) * ((4))"], ["", "1 +", "1+2", "(1", "1 - 2"]),
    ],
    ids=["patches", "sums"],
)
def test_grammars_of_coding_agents_are_enforced(grammar: str, accepted: list[str], refused: list[str]) -> None:
    for reasoning in (False, True):
        matcher = FormMatcher(structural_tag=form(grammar), reasoning=reasoning)
        assert [text for text in accepted if not matcher.accepts(quoted(text))] == []
        assert [text for text in refused if matcher.accepts(quoted(text))] == []
        assert not matcher.accepts(accepted[0]) and not matcher.accepts(quoted(accepted[0]) + " ")


@pytest.mark.parametrize(
    "grammar",
    [
        r"start: /.*/",
        r"start: /.+/s",
        r"start: /a.b|(?s:.)|(?s)c./",
        r"start: /(?s:(?-s:.)a)/",
        r"start: /[^a]{1,2}/",
        r"start: /[\s\S]\s?/",
        r"start: /\w\W|\D\d|\S/",
        r'start: /["\\\n-]+/',
        r"start: /[]\x00-\x20^][!-~]/",
        r"start: /[a-z\s--[b\n]]|[[:^space:]&&[\"1]]|[\x{9}\u000a~~\u{a}]/",
        r"start: /[[:cntrl:]]|[[:punct:]]/",
        r"start: /\pL|\p{Nd}|\P{L}1|[\p{Cc}]a/",
        r"start: /(?i:A\nB*|\ta)|\.\//",
        r"start: /(?P<one>a\n*)+\x22?/",
        r'start: "a\n" | "A\"b\x22C"i | "\u005c" | "\/" | "é"',
        r'start: "!".."~" "\t"',
        'start: a-rule A-TERMINAL\na-rule: "a"\nA-TERMINAL: "\\n"?',
        'start: a+ [b]\na: "a" "\\n"?\n!b: "B"\n%ignore " "\n%ignore /\\n/',
        'start: x | _y\nx: A "\\\\"{1,2}\n  | "b" -> other // "\n_y: A~2..3 "\\n"~1\n%import common (WS, INT)\nA: "a"\n',
        '%llguidance {}\nstart: "a" "\\n"',
        'start: (A ("b"\n | "1"))+\nA: /[a-z]*/ & /[^b"]*/\n%import common.WS_INLINE -> SPACE\n%ignore SPACE',
        'root ::= [^a\\n]* "\\""? a\na ::= [ab] "\\n"',
        *(f"start: X\n%import common.{name} -> X" for name in COMMON),
    ],
)  # fmt: skip
def test_json_writes_exactly_the_texts_of_a_grammar(grammar: str) -> None:
    plain, in_a_string = FormMatcher(grammar=grammar), FormMatcher(structural_tag=form(grammar))
    texts = [*TEXTS, "#a", "//a", "/*\n*/", "--\ta", "\r\n\n", "a\nA", "a \n a", 'A"B"c', "b\\", "aa\n"]
    accepted = [text for text in texts if plain.accepts(text)]
    assert [text for text in texts if in_a_string.accepts(quoted(text))] == accepted
    assert 0 < len(accepted) < len(texts)


def test_expressions_without_what_json_escapes_stay_as_they_are() -> None:
    same = r"(?:a|[b-z0-9_]*?)\d{2,}(?P<name>\w+)\.\/[^\x00-\x22\\]"
    assert in_json(same) == same


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "a" | "(" start ")" | "\\n"', "the rule start calls itself; such a grammar can have no quotes"),
        ('start: a\na: b\nb: a | /"/', "calls itself"),
        ("begin: /a/", "there is no rule start"),
        ('start: a\n"b"', 'line 2: "b" is no beginning of a rule'),
        ("start: /\\n/ b", "line 1: there is no rule or terminal b"),
        ("start: b", 'unknown name: "b"'),
        ('-> a\nstart: "b"', "line 1: - is no beginning of a rule"),
        ("->", "line 1: - is no beginning of a rule"),
        ('start: "a"..5', "line 1: a range has to have a string of one character at each end"),
        ('start: "a"..', "a range has to have a string of one character at each end"),
        ('start: "ab".."z"', "a range has to have a string of one character at each end"),
        ('start: "a".."z"i', "a range has to have a string of one character at each end"),
        ('start: rule-start "\\n"\nrule-start: "a"', "line 2: rule-start is a name that stands for a part of the call"),
        ('start: RULE-START "\\n"\nRULE-START: "a"', "line 2: RULE-START is a name that stands for a part of the call"),
        ('start: json-text\njson-text: "a"', "line 2: json-text is a name that stands for a part of the call"),
        ("start: a\na: /a/\na: /b/", "line 3: there are two definitions of a"),
        ("start: a\na[lazy]: /.*/", "line 2: a has to have a colon behind it"),
        ("start: A\nA.2: /a/", "line 2: A has to have a colon behind it"),
        ('start: a::0x0\na::_: "x"', "there are no attributes and priorities here"),
        ("start: /a(?=b)/", "line 1: the expression looks ahead or behind"),
        ("start: /a(?<!b)/", "looks ahead or behind"),
        ("start: /a b/x", "the flag x is not possible"),
        ("start: /(?x: a)/", "the flag x; i, m, s and U are possible"),
        (r"start: /\p{Greek}/", r"\p is not possible here"),
        (r"start: /[[:vowel:]]/", "there is no class [:vowel:]"),
        (r"start: /\x01/", "cannot be written in JSON"),
        (r"start: /[a/", "ends in the middle"),
        ("start: /" + "[" * 9_000 + "/", "nests classes too deeply"),
        (r"start: /a)/", "unmatched bracket"),
        (r"start: /\u{110000}/", "is no character"),
        (r"start: /[a-\d]/", "a range ends with a set"),
        (r"start: /(a/", "the grammar is not possible"),
        (r'start: "\q"', "has an escape that is not possible"),
        ("start: %json {}", "%json is not possible in the text of a call"),
        ('start: %regex {"substring_chars": "a"}', "%regex is not possible in the text of a call"),
        ("start: <call>", "<call> is not possible in the text of a call"),
        ("%import my.WS\nstart: WS", "line 1: only terminals of common can be imported"),
        ('start: "a" %if x', "%if is not possible"),
        ("start: @text0", "no other grammars"),
        ('start: "\ud800"', "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_what_would_not_be_enforced_is_refused(grammar: str, words: str) -> None:
    for fields, param in (({}, "structured_outputs.structural_tag"), ({"param": "tools[0].format.definition"},) * 2):
        with pytest.raises(InvalidRequest) as caught:
            FormMatcher(structural_tag=form(grammar, **fields))
        assert words in str(caught.value)
        assert caught.value.param == (fields["param"] if fields else param)
