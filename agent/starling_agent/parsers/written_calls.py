"""The forms of calls for grammars: structural tags of the calls that a model may write, or has to.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api.html
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starling_agent.parsers.schemas import is_text, schema_of

Tag = dict[str, Any]
NAME, KEY, IS_TEXT = "NAME", "KEY", "IS_TEXT"
"""Stand in a format's texts for the names of a tool and of an argument, and for whether this is text (true or false)."""
ANY_OBJECT = {"type": "object"}


def json_arguments(schema: Any) -> Tag:
    """Returns the form of arguments that are a JSON object."""
    return {"type": "json_schema", "json_schema": ANY_OBJECT if schema is None else schema}


def keyed_arguments(begins: str, ends: str, stops: str, call_ends: str) -> Callable[[Any], Tag]:
    """Returns what makes the form of arguments that have a pair of tags each, in the order of the schema.

    Args:
        begins: the text before a value.
        ends: the text behind it.
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
            before = begins.replace(IS_TEXT, "true" if is_text(of_key) else "false").replace(KEY, key)
            argument = _sequence(_text(before), _value(of_key, stops), _text(ends))
            optional = {"type": "or", "elements": [argument, _text("")]}
            elements.append(argument if isinstance(required, list) and key in required else optional)
        return _sequence(*elements)

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

    def required(self, schemas: Mapping[str, Any], *, parallel: bool) -> Tag:
        """Returns the form of an output that is a call of one of the tools, or several where nothing stands around all of them."""
        calls = [self._call(name, schema) for name, schema in schemas.items()]
        if parallel and self.trigger and not self.opens:
            return _output({"type": "triggered_tags", "triggers": [self.trigger], "tags": calls, "at_least_one": True})
        return _output(_sequence(_text(self.opens), {"type": "or", "elements": calls}, _text(self.closes)))

    def possible(self, schemas: Mapping[str, Any]) -> Tag | None:
        """Returns the form of text in which every call is of one of the tools; None where no marker says that a call begins."""
        if not self.trigger or self.opens:
            return None
        calls = [self._call(name, schema) for name, schema in schemas.items()]
        return _output({"type": "triggered_tags", "triggers": [self.trigger], "tags": calls})

    def _call(self, name: str, schema: Any) -> Tag:
        return {"type": "tag", "begin": self.begins.replace(NAME, name), "content": self.arguments(schema), "end": self.ends}


def _value(schema: Any, stops: str) -> Tag:
    if not is_text(schema):
        return {"type": "json_schema", "json_schema": True if schema is None else schema}
    choices = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(choices, list) and choices:
        return {"type": "or", "elements": [_text(choice) for choice in choices if isinstance(choice, str)]}
    return {"type": "any_text", "excludes": [stops]}


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Tag) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _output(form: Tag) -> Tag:
    return {"type": "structural_tag", "format": form}
