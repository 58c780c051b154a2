"""Structural tags: texts with parts that have a form of their own, as vLLM and xgrammar describe them.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api.html
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.constant_texts import ConstantTexts
from starling_engine.structured_output.enforced_schema import enforced_schema, parsed
from starling_engine.structured_output.expressions import check_expression
from starling_engine.structured_output.grammar import Grammar, fault_of
from starling_engine.structured_output.json_lark import json_lark
from starling_engine.structured_output.lark import LarkRules, Part, RulePart, TextPart, expression, json_text, literal, text_without
from starling_engine.structured_output.special_tokens import SpecialTokens

T = TypeVar("T")
Follows = str | None
"""The text that comes next; None for what is no constant text."""
END = ""
"""Nothing comes next: the output ends."""

_NAMES: dict[type, str] = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}


class _Tag(NamedTuple):
    begin: str
    content: Callable[[Follows], list[Part]]
    end: str
    path: str


def structural_grammars(value: Any, param: str, tokens: SpecialTokens, *, white_space: bool) -> list[Grammar]:
    """Returns the library's grammar, and those that it calls.

    `value` is a text of JSON, or parsed. Raises `InvalidRequest` with the path of what is wrong.
    """
    writer = _Writer(param, tokens, white_space)
    return [{"lark_grammar": writer.written(parsed(value, param))}, *writer.called]


class _Writer:
    def __init__(self, param: str, tokens: SpecialTokens, white_space: bool) -> None:
        self._param = param
        self._tokens = tokens
        self._white_space = white_space
        self._rules = LarkRules()
        self.called: list[Grammar] = []
        """Grammars that the rules call."""
        self._constants = ConstantTexts(tokens)
        self._formats: dict[str, Callable[[dict[str, Any], str, Follows], list[Part]]] = {
            "const_string": self._constant,
            "json_schema": self._schema,
            "regex": self._expression,
            "json_string": self._json_string,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._choice,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def written(self, spec: Any) -> str:
        if self._field(spec, "$", "type", str) != "structural_tag":
            raise self._refusal("$.type", "has to be structural_tag")
        if "structures" in spec:
            return self._rules.written(self._legacy(spec))
        self._check_fields(spec, "$", "type", "format")
        return self._rules.written(self._format(self._field(spec, "$", "format", dict), "$.format", END))

    # ---- formats ----

    def _format(self, value: Any, path: str, follows: Follows) -> list[Part]:
        kind = self._field(value, path, "type", str)
        write = self._formats.get(kind)
        if write is None:
            raise self._refusal(path, f"the type {kind[:100]} is not possible; {', '.join(self._formats)} are")
        return write(value, path, follows)

    def _constant(self, value: dict[str, Any], path: str, _: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "value")
        return self._literal(self._field(value, path, "value", str), f"{path}.value")

    def _schema(self, value: dict[str, Any], path: str, _: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "json_schema", "style", "param")
        if self._field(value, path, "style", str, "json") != "json":
            raise self._refusal(f"{path}.style", "only json is possible")
        schema = value.get("json_schema")
        if "param" in value:
            return self._json(schema, "$", self._field(value, path, "param", str))
        return self._json(schema, f"{path}.json_schema", self._param)

    def _expression(self, value: dict[str, Any], path: str, _: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "pattern")
        pattern = self._field(value, path, "pattern", str)
        check_expression(pattern, self._param, f"{path}.pattern: ")
        return [TextPart(expression(pattern))]

    def _json_string(self, value: dict[str, Any], path: str, _: Follows) -> list[Part]:
        """A JSON string whose text has a grammar of the caller."""
        self._check_fields(value, path, "type", "grammar", "param")
        param = self._field(value, path, "param", str, self._param)
        grammar: Grammar = {
            "name": f"text{len(self.called)}",
            "lark_grammar": json_lark(self._field(value, path, "grammar", str), param, self._tokens),
        }
        if fault := fault_of(grammar):
            raise InvalidRequest(f"the grammar is not possible: {fault}", param)
        self.called.append(grammar)
        return [TextPart(literal('"')), RulePart(f"@{grammar['name']}")]

    def _any_text(self, value: dict[str, Any], path: str, follows: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "excludes")
        return [self._text(self._texts(value, path, "excludes", []), path, follows)]

    def _sequence(self, value: dict[str, Any], path: str, follows: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "elements")
        elements = self._field(value, path, "elements", list)
        parts: list[Part] = []
        for at, element in enumerate(elements):
            after = _beginning(elements[at + 1]) if at + 1 < len(elements) else follows
            parts += self._format(element, f"{path}.elements[{at}]", after)
        return parts

    def _choice(self, value: dict[str, Any], path: str, follows: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "elements")
        elements = self._field(value, path, "elements", list)
        if not elements:
            raise self._refusal(f"{path}.elements", "has to have an element")
        # A text in a branch is a terminal of its own, and would not stop before what comes next.
        after = END if follows == END else None
        return [self._rules.one_of([self._format(one, f"{path}.elements[{at}]", after) for at, one in enumerate(elements)])]

    def _tag(self, value: dict[str, Any], path: str, follows: Follows) -> list[Part]:
        return self._tagged(self._read_tag(value, path), follows)

    def _triggered_tags(self, value: dict[str, Any], path: str, follows: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
        tags = [self._read_tag(one, f"{path}.tags[{at}]") for at, one in enumerate(self._field(value, path, "tags", list))]
        triggers, excludes = self._texts(value, path, "triggers"), self._texts(value, path, "excludes", [])
        at_once = self._field(value, path, "at_least_one", bool, False)
        only_one = self._field(value, path, "stop_after_first", bool, False)
        return self._triggered(triggers, tags, excludes, path, follows, at_once=at_once, only_one=only_one)

    def _tags_with_separator(self, value: dict[str, Any], path: str, _: Follows) -> list[Part]:
        self._check_fields(value, path, "type", "tags", "separator", "at_least_one", "stop_after_first")
        tags = [self._read_tag(one, f"{path}.tags[{at}]") for at, one in enumerate(self._field(value, path, "tags", list))]
        if not tags:
            raise self._refusal(f"{path}.tags", "has to have a tag")
        separator = self._literal(self._field(value, path, "separator", str), f"{path}.separator")
        one = self._rules.one_of([self._tagged(tag, None) for tag in tags])
        several: list[Part] = [one]
        if not self._field(value, path, "stop_after_first", bool, False):
            several.append(RulePart(f"{self._rules.one_of([[*separator, one]]).rule}*"))
        return several if self._field(value, path, "at_least_one", bool, False) else [self._rules.one_of([several, []])]

    def _legacy(self, spec: dict[str, Any]) -> list[Part]:
        """vLLM's older form."""
        self._check_fields(spec, "$", "type", "structures", "triggers")
        structures = self._field(spec, "$", "structures", list)
        tags = [self._read_structure(one, f"$.structures[{at}]") for at, one in enumerate(structures)]
        return self._triggered(self._texts(spec, "$", "triggers"), tags, [], "$", END, at_once=False, only_one=False)

    # ---- tags ----

    def _read_structure(self, value: Any, path: str) -> _Tag:
        begin, end = self._field(value, path, "begin", str), self._field(value, path, "end", str)
        self._check_fields(value, path, "begin", "schema", "end")
        return _Tag(begin, lambda _: self._json(value.get("schema"), f"{path}.schema", self._param), end, path)

    def _read_tag(self, value: Any, path: str) -> _Tag:
        if self._field(value, path, "type", str, "tag") != "tag":
            raise self._refusal(f"{path}.type", "has to be tag")
        self._check_fields(value, path, "type", "begin", "content", "end")
        begin, end = self._field(value, path, "begin", str), self._field(value, path, "end", str)
        content = self._field(value, path, "content", dict)
        return _Tag(begin, lambda follows: self._format(content, f"{path}.content", follows), end, path)

    def _tagged(self, tag: _Tag, follows: Follows) -> list[Part]:
        begin, end = self._literal(tag.begin, f"{tag.path}.begin"), self._literal(tag.end, f"{tag.path}.end")
        return [*begin, *tag.content(tag.end or follows), *end]

    def _triggered(
        self,
        triggers: Sequence[str],
        tags: Sequence[_Tag],
        excludes: Sequence[str],
        path: str,
        follows: Follows,
        *,
        at_once: bool,
        only_one: bool,
    ) -> list[Part]:
        """Text in which each trigger begins a tag. The first one begins `at_once`, with no text before; or there is `only_one`."""
        self._check_triggers(triggers, tags, path)
        whole = [self._tagged(tag, END if only_one and follows == END else None) for tag in tags]
        if at_once and only_one:
            return [self._rules.one_of(whole)]
        # With only one, texts stand in branches, as in `_choice`.
        text = self._text([*triggers, *excludes], path, None if only_one and follows != END else follows)
        begun: list[list[Part]] = [[text, *parts] for parts in whole]
        if only_one:
            return [self._rules.one_of([[text], *begun])]
        more = RulePart(f"{self._rules.one_of(begun).rule}*")
        return [self._rules.one_of(whole), more, text] if at_once else [more, text]

    def _check_triggers(self, triggers: Sequence[str], tags: Sequence[_Tag], path: str) -> None:
        if not triggers or not all(triggers) or not tags:
            raise self._refusal(path, "needs a tag, and triggers that are not empty")
        for one in set(triggers):
            if any(one in other for other in triggers if other != one):
                raise self._refusal(f"{path}.triggers", f"{one!r} is a part of another trigger, which could never be written")
        for tag in tags:
            if not tag.begin.startswith(tuple(triggers)):
                raise self._refusal(f"{tag.path}.begin", "has to begin with a trigger")

    # ---- parts ----

    def _text(self, excludes: Sequence[str], path: str, follows: Follows) -> TextPart:
        if follows is None:
            raise self._refusal(path, "ends with any text, behind which a constant text has to come, or nothing")
        return TextPart(text_without([word for word in (*excludes, follows) if word]))

    def _literal(self, text: str, path: str) -> list[Part]:
        try:
            return self._constants.parts(text)
        except ValueError as error:
            raise self._refusal(path, str(error)) from None

    def _json(self, schema: Any, path: str, param: str) -> list[Part]:
        enforced = enforced_schema(parsed(schema, param), param, white_space=self._white_space, path=path)
        return [RulePart(f"%json {json_text(enforced)}")]

    # ---- fields ----

    def _field(self, value: Any, path: str, name: str, kind: type[T], default: T | None = None) -> T:
        if not isinstance(value, dict):
            raise self._refusal(path, "has to be an object")
        found = value.get(name, default)
        if not isinstance(found, kind):
            raise self._refusal(f"{path}.{name}", f"has to be {_NAMES[kind]}")
        return found

    def _texts(self, value: dict[str, Any], path: str, name: str, default: list[str] | None = None) -> list[str]:
        found: list[Any] = self._field(value, path, name, list, default)
        if not all(isinstance(text, str) for text in found):
            raise self._refusal(f"{path}.{name}", "has to be a list of texts")
        return found

    def _check_fields(self, value: dict[str, Any], path: str, *known: str) -> None:
        for name in value:
            if name not in known:
                raise self._refusal(path, f"the field {name[:100]} is not possible; {', '.join(known)} are")

    def _refusal(self, path: str, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{path}: {reason}", self._param)


def _beginning(value: Any) -> Follows:
    """The constant text with which a format begins, if it does."""
    fields = value if isinstance(value, dict) else {}
    kind = fields.get("type")
    if kind == "sequence":
        elements = fields.get("elements")
        return _beginning(elements[0]) if isinstance(elements, list) and elements else None
    text = fields.get({"const_string": "value", "tag": "begin"}.get(str(kind), ""))
    return text if isinstance(text, str) and text else None
