"""The forms of calls for grammars: structural tags of the calls that a model may write, or has to.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api.html
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.params import MAX_FORM_CHARACTERS

from starling_agent.parsers.schemas import GrammarSchema, is_text, schema_of, types_of

Tag = dict[str, Any]
NAME, KEY, IS_TEXT, TYPE = "NAME", "KEY", "IS_TEXT", "TYPE"
"""Stand in a format's texts for the names of a tool and of an argument, whether this is text (true or false), and its type."""
ANY_OBJECT = {"type": "object"}
NO_PATHS: Mapping[str, str] = {}
MAX_PARTS = MAX_FORM_CHARACTERS // 10
"""Parts of the forms of a request's calls. Each has ten characters or more, and schemas may refer to themselves: what the engine
would refuse for its size is not even made."""


def json_arguments(schema: Any) -> Tag:
    """Returns the form of arguments that are a JSON object, also where the schema does not say so."""
    if isinstance(schema, GrammarSchema):
        return sequence(constant(f"{{{json.dumps(schema.key)}: "), json_string(schema), constant("}"))
    if isinstance(schema, dict) and (not types_of(schema) or isinstance(schema.get("type"), list)):
        schema = {**schema, **ANY_OBJECT}
    return {"type": "json_schema", "json_schema": ANY_OBJECT if schema is None else schema}


def json_string(schema: GrammarSchema) -> Tag:
    """Returns the form of a text with a grammar, as JSON writes it."""
    return {"type": "json_string", "grammar": schema.grammar, "param": schema.param}


def keyed_arguments(begins: str, ends: str, stops: str, call_ends: str) -> Callable[[Any], Tag]:
    """Returns what makes the form of arguments that have a pair of tags each, in the order of the schema.

    Args:
        begins: the text before a value.
        ends: the text behind it; it may have the KEY too.
        stops: what no value has that is text.
        call_ends: the tag behind a call; of a schema without properties, arguments are anything before it.
    """

    def arguments(schema: Any) -> Tag:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        required = schema.get("required") if isinstance(schema, dict) else None
        if not isinstance(properties, dict):
            return {"type": "any_text", "excludes": [call_ends]}
        elements = []
        for key in properties:
            of_key = schema_of(schema, key)
            before = begins.replace(IS_TEXT, "true" if is_text(of_key) else "false").replace(TYPE, _type(of_key)).replace(KEY, key)
            value = named(_value(of_key, stops), property_path(key))
            argument = sequence(constant(before), value, constant(ends.replace(KEY, key)))
            optional = one_of([argument, constant("")])
            elements.append(argument if isinstance(required, list) and key in required else optional)
        return sequence(*elements)

    return arguments


@dataclass(frozen=True)
class WrittenCalls:
    """The texts around calls.

    begins     before a call's arguments, with its NAME
    ends       behind them
    opens      before the first call
    closes     behind the last one
    trigger    begins each call, and no other text; nothing for formats without such a marker
    arguments  makes the form of arguments of a schema
    """

    begins: str
    ends: str
    opens: str = ""
    closes: str = ""
    trigger: str = ""
    arguments: Callable[[Any], Tag] = json_arguments

    @property
    def marks_calls(self) -> bool:
        """Says if a marker begins each call, so that calls among text can be enforced."""
        return bool(self.trigger) and not self.opens

    def holds(self, schema: GrammarSchema) -> bool:
        """Says if the text of the arguments can be held to its grammar. Between tags it cannot."""
        return self.arguments(schema) != self.arguments(dict(schema))

    def required(self, schemas: Mapping[str, Any], *, parallel: bool, paths: Mapping[str, str] = NO_PATHS) -> Tag:
        """Returns the form of an output that is a call of one of the tools, or several where nothing stands around all of them.

        `paths` are the request's names of the schemas, for errors.
        """
        calls = self._calls(schemas, paths)
        if parallel and self.marks_calls:
            return _output({"type": "triggered_tags", "triggers": [self.trigger], "tags": calls, "at_least_one": True})
        return _output(sequence(constant(self.opens), one_of(calls), constant(self.closes)))

    def possible(self, schemas: Mapping[str, Any], *, paths: Mapping[str, str] = NO_PATHS) -> Tag | None:
        """Returns the form of text in which every call is of one of the tools; None where no marker says that a call begins.

        `paths` are as in `required`.
        """
        if not self.marks_calls:
            return None
        return _output({"type": "triggered_tags", "triggers": [self.trigger], "tags": self._calls(schemas, paths)})

    def _calls(self, schemas: Mapping[str, Any], paths: Mapping[str, str]) -> list[Tag]:
        calls, parts = [], 0
        for name, schema in schemas.items():
            path = paths.get(name, "tools")
            calls.append(self._call(name, schema, path))
            parts += _parts(calls[-1])
            if parts > MAX_PARTS:
                raise InvalidRequest(f"with it the form of the tools' calls has more than {MAX_FORM_CHARACTERS} characters", path)
        return calls

    def _call(self, name: str, schema: Any, path: str) -> Tag:
        try:
            content = named(self.arguments(schema), path)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, path) from None
        return {"type": "tag", "begin": self.begins.replace(NAME, name), "content": content, "end": self.ends}


def _type(schema: Any) -> str:
    """Returns the name of an argument's type; that of objects where several are possible, none of which alone is text."""
    types = types_of(schema)
    return next(iter(types)) if len(types) == 1 else "object"


def _value(schema: Any, stops: str) -> Tag:
    if not is_text(schema):
        return {"type": "json_schema", "json_schema": True if schema is None else schema}
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(choices, list) and choices:
        return one_of([constant(choice) for choice in choices if isinstance(choice, str)])
    return {"type": "any_text", "excludes": [stops]}


def named(form: Tag, path: str) -> Tag:
    """Returns the form with the name that errors have for its schemas; in front of the one that these have within it."""
    if form["type"] == "json_schema":
        return {**form, "param": path + form.get("param", "")}
    parts: Tag = {name: [named(one, path) for one in form[name]] for name in ("elements", "tags") if name in form}
    if "content" in form:
        parts["content"] = named(form["content"], path)
    return {**form, **parts}


def _parts(form: Tag) -> int:
    inner = [*form.get("elements", ()), *form.get("tags", ()), *([form["content"]] if "content" in form else [])]
    return 1 + sum(map(_parts, inner))


def property_path(key: str) -> str:
    """Returns where a schema has that of a property."""
    return f".properties.{key}"


def constant(value: str) -> Tag:
    """Returns the form of this text."""
    return {"type": "const_string", "value": value}


def one_of(elements: list[Tag]) -> Tag:
    """Returns the form of what has one of these."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def sequence(*elements: Tag) -> Tag:
    """Returns the form of these, one behind the other."""
    return {"type": "sequence", "elements": list(elements)}


def _output(form: Tag) -> Tag:
    return {"type": "structural_tag", "format": form}
