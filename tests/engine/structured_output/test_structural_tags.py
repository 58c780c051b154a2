"""Structural tags: free text is free, tags hold their form, and nothing else of them is taken."""

import json
from typing import Any

import pytest
from starling_engine.errors import InvalidRequest

from tests.engine.structured_output.matching import CALL, THINK, UNTHINK, FormMatcher

Output = str | list[str | int]
INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": INTEGERS}
ANY = {"type": "any_text"}
X = '<f=x>{"a":1}</f>'


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def row(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def triggered(**more: Any) -> dict[str, Any]:
    tags = [{"begin": "<f=x>", "content": JSON, "end": "</f>"}, tag("<f=y>", regex("[0-9]*"), "</f>")]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **more}


def separated(**more: Any) -> dict[str, Any]:
    tags = [tag("<", const("a"), ">"), tag("<", const("b"), ">")]
    return {"type": "tags_with_separator", "separator": ",", "tags": tags, **more}


def matcher(form: dict[str, Any], **more: Any) -> FormMatcher:
    return FormMatcher(structural_tag={"type": "structural_tag", "format": form}, **more)


@pytest.mark.parametrize(
    ("form", "accepted", "refused"),
    [
        (const("a/b\n\"<"), ["a/b\n\"<"], ["", "a"]),
        (const(""), [""], ["a"]),
        (row(), [""], ["a"]),
        (JSON, ['{"a":1}', '{ "a": 1}'], ["{}", '{"a":1} ']),
        (regex("^a+|b$"), ["aa", "b"], ["ab", ""]),
        (ANY, ["", "a\n<f=>"], [[CALL]]),
        (ANY | {"excludes": ["ab", "z"]}, ["", "aa ba"], ["xab", "z"]),
        (row(const("a"), JSON, const("b")), ['a{"a":1}b'], ['a{"a":1}', 'a{"a":1} b']),
        # Texts in a row are matched as one expression.
        (row(regex("a*|b"), const("ab")), ["aab", "ab", "bab"], ["b", "aa"]),
        (row(regex(""), const("ab"), regex("")), ["ab"], ["", "a"]),
        (row(regex(".*"), const("]")), ["a]", "a]]"], ["a"]),
        (one_of(const("yes"), JSON, const("yesterday")), ["yes", "yesterday", '{"a":1}'], ["", "y", "{}"]),
        (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a</t</t>", "<t>a\nb</t>"], ["<t>a</t>b", "<t>a", "a</t>"]),
        (tag("", ANY, "."), ["abc.", "."], ["abc", "a.b."]),
        (tag("[", row(regex("[a-z]+"), ANY), "]"), ["[ab1]"], ["[1]", "[a]]"]),
        (row(ANY, tag("<t>", JSON, "")), ['hi <t>{"a":1}'], ["hi", '<t>{"a":1} hi']),
        (row(ANY, row(const("."), ANY)), ["a.b", ".", "a.b.c"], ["a"]),
        (triggered(), ["", "hi <f", X, f"hi {X} and <f=y>12</f>{X}", "</f>"],
         ["<f=", "<f=z>", "<f=x>{}</f>", "<f=y>a</f>", "a <f=x>"]),
        (triggered(excludes=["!"]), ["hi"], ["hi!", f"{X}!"]),
        (triggered(at_least_one=True), [X, f"{X} hi {X}"], ["", "hi", f"hi {X}"]),
        (triggered(stop_after_first=True), ["", "hi", f"hi {X}"], [f"{X} hi", f"{X}{X}", "<f="]),
        (triggered(stop_after_first=True, at_least_one=True), [X], ["", f"hi {X}", f"{X}{X}"]),
        (tag("<s>", triggered(), "</s>"), ["<s>x</s>", f"<s>x{X}y</s>", f"<s>{X}</s>"], ["<s>x</s>y", f"<s>{X}", "<s><f=</s>"]),
        (row(tag("<t>", ANY, "</t>"), triggered()), ["<t>a</t>", f"<t><f=</t>b{X}"], ["a", "<t>a</t><f="]),
        (row(triggered(stop_after_first=True, at_least_one=True), JSON), [f'{X}{{"a":1}}'], [X]),
        (separated(), ["", "<a>", "<a>,<b>,<a>"], ["<a>,", ",", "<a><b>", "<c>"]),
        (separated(at_least_one=True), ["<a>", "<b>,<b>"], ["", ","]),
        (separated(stop_after_first=True), ["", "<a>"], ["<a>,<b>"]),
        (row(const("["), separated(), const("]")), ["[]", "[<a>,<a>]"], ["[", "<a>"]),
        # Special tokens are tokens.
        (tag("<think>", ANY, "</think>\n"), [[THINK, "ab", UNTHINK, "\n"]],
         ["<think>ab</think>\n", [THINK, "</think>\n", UNTHINK, "\n"]]),
        (tag("<call>\n", ANY, "\n</think>"), [[CALL, "\na\n", UNTHINK], [CALL, "\n\n\n", UNTHINK]],
         [[CALL, "\n", UNTHINK], [CALL, "\na", UNTHINK]]),
        ({"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("<call>", JSON, "</think>")]},
         ["hi", ["hi <cal", CALL, '{"a":1}', UNTHINK, " hi"]], ["<call>", [CALL, "{}", UNTHINK], [CALL], ["a", THINK]]),
    ],
)  # fmt: skip
def test_a_format_is_enforced(form: dict[str, Any], accepted: list[Output], refused: list[Output]) -> None:
    found = matcher(form)
    assert [output for output in accepted if not found.accepts(output)] == []
    assert [output for output in refused if found.accepts(output)] == []


def structure(begin: str, schema: Any) -> dict[str, Any]:
    return {"begin": begin, "schema": schema, "end": "</f>"}


def older(*structures: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "structures": list(structures), "triggers": ["<f="]}


def test_the_older_form() -> None:
    spec = older(structure("<f=x>", INTEGERS), structure("<f=y>", '{"type": "integer"}'))
    for given in (spec, json.dumps(spec)):
        found = FormMatcher(structural_tag=given)
        assert all(found.accepts(output) for output in ("", "hi", f"hi {X} <f=y>3</f>", '<f=x>{ "a": 1 }</f>'))
        assert not any(found.accepts(output) for output in ("<f=z>", "<f=y>a</f>", f"{X}<f=", '<f=x>{"a":1} </f>'))


def test_json_in_tags_has_no_white_space_if_none_is_wanted() -> None:
    found = matcher(triggered(), disable_any_whitespace=True)
    assert found.accepts(X) and not found.accepts('<f=x>{"a": 1}</f>')


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{", "the text is not JSON"),
        ([], "$: has to be an object"),
        ({"type": "json_schema"}, "$.type: has to be structural_tag"),
        ({"type": "structural_tag"}, "$.format: has to be an object"),
        ({"type": "structural_tag", "format": JSON, "max_tokens": 5}, "$: the field max_tokens is not possible"),
        (older(structure("<f=", {"not": {"pattern": "a"}})), "$.structures[0].schema.not: "),
        (older(structure("<f=", None)), "$.structures[0].schema: a schema has to be"),
        (older(structure("<f=x>", {}), structure("a", {})), "$.structures[1].begin: has to begin with"),
        (older(structure("<f=x>", {}) | {"any": 1}), "$.structures[0]: the field any is not possible"),
        (older(), "$: needs a tag"),
    ],
)
def test_what_is_no_structural_tag_is_refused(spec: Any, words: str) -> None:
    _assert_refused(words, structural_tag=spec if isinstance(spec, str | dict) else json.dumps(spec))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "grammar", "grammar": "x"}, "$.format: the type grammar is not possible; const_string, "),
        ({"type": ["tag"]}, "$.format.type: has to be a text"),
        (row(const("a"), {"type": "token", "token": 5}), "$.format.elements[1]: the type token is not possible"),
        (const("a") | {"max": 1}, "$.format: the field max is not possible"),
        (JSON | {"style": "qwen_xml"}, "$.format.style: only json"),
        (JSON | {"any_order": True}, "the field any_order"),
        ({"type": "json_schema"}, "$.format.json_schema: a schema has to be"),
        (tag("a", JSON | {"json_schema": {"items": {"maxLen": 1}}}, ""), "$.format.content.json_schema.items.maxLen: "),
        (regex("a*+"), "$.format.pattern: the expression repeats"),
        (ANY | {"max_tokens": 3}, "the field max_tokens"),
        (ANY | {"excludes": "a"}, "$.format.excludes: has to be a list"),
        (ANY | {"excludes": [1]}, "$.format.excludes: has to be a list of texts"),
        (row(ANY, JSON), "$.format.elements[0]: ends with any text"),
        (row(ANY, regex("a")), "$.format.elements[0]: ends with any text"),
        (row(one_of(ANY, JSON), const("a")), "$.format.elements[0].elements[0]: ends with any text"),
        (row(triggered(), JSON), "$.format.elements[0]: ends with any text"),
        (tag("<", triggered(stop_after_first=True), ">"), "$.format.content: ends with any text"),
        (triggered(tags=[tag("<f=", ANY, "")]), "$.format.tags[0].content: ends with any text"),
        (one_of(), "$.format.elements: has to have an element"),
        (tag("a", const("b"), "<end>"), "$.format.end: <end> ends the output"),
        ({"type": "tag", "begin": "a", "content": ANY, "end": ["a", "b"]}, "$.format.end: has to be a text"),
        (triggered(triggers=[]), "$.format: needs a tag, and triggers"),
        (triggered(triggers=[""]), "$.format: needs a tag, and triggers"),
        (triggered(triggers=["<f=", "<f"]), "$.format.triggers: '<f' is a part of another"),
        (triggered(triggers=["<g="]), "$.format.tags[0].begin: has to begin with a trigger"),
        (triggered(at_least_one="yes"), "$.format.at_least_one: has to be true or false"),
        (triggered(tags=[JSON]), "$.format.tags[0].type: has to be tag"),
        (const("\ud800"), "half of a surrogate pair"),
    ],
)
def test_what_would_not_be_enforced_is_refused(form: dict[str, Any], words: str) -> None:
    _assert_refused(words, structural_tag={"type": "structural_tag", "format": form})


def _assert_refused(words: str, **wanted: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FormMatcher(**wanted)
    assert words in str(caught.value) and caught.value.param == "structured_outputs.structural_tag"
