"""The base of requests: parses their bytes, and explains what is wrong with them."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import ErrorDetails, from_json
from starling_engine.errors import InvalidRequest

from starling_agent.openai.protocol.refused import FieldRefusal, without_refused

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer of 64 bits; each field's own bounds are checked where the field is used."""

SHOWN_CHARACTERS = 60
SEARCHED_BYTES = 2**20
DEEP = 190
"""Levels of nesting, a little fewer than the parser takes."""
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"(?:\s*:)?|\\?\Z)|[{}\[\]]', re.DOTALL)
"""A string, with the colon behind a key, or a bracket. A string that does not end is one, too: none is begun within it."""
MAX_COMMAS = 2**20
"""Commas in a body. Each may begin a value, and a million values block the event loop for a second; one long string does not."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


StrOrList = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])]


class RequestModel(BaseModel):
    """A request body. It is strict: "0.5" is no number and true is no count. Unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    refusals: ClassVar[Mapping[str, FieldRefusal]] = {}

    @classmethod
    def parse(cls, body: bytes, unsaid: Mapping[str, Any] | None = None) -> Self:
        """Parses a body, where `unsaid` has values of fields that it may leave out. Raises InvalidRequest as `checked` does."""
        fields = _json_object(body)
        added = {name: value for name, value in (unsaid or {}).items() if fields.get(name) is None}
        return cls.checked(fields | added)

    @classmethod
    def checked(cls, fields: dict[str, Any]) -> Self:
        """Makes a request of its fields. Raises InvalidRequest naming the field at fault."""
        try:
            return cls.model_validate(without_refused(fields, cls.refusals))
        except pydantic.ValidationError as error:
            raise _explained(error.errors(include_url=False), cls, fields) from None


def _json_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if body.count(b",") > MAX_COMMAS:
        raise InvalidRequest(f"the body has more than {MAX_COMMAS} values (commas, those of its texts included)")
    try:
        value = from_json(body)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise InvalidRequest(
                "the body is JSON that is nested too deep: some 200 levels are possible", _deep_field(body)
            ) from None
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def _deep_field(body: bytes) -> str | None:
    """Returns the field of a body whose nesting no parser takes, if it is near the beginning."""
    name, depth = None, 0
    for match in _JSON_TOKEN.finditer(body, 0, SEARCHED_BYTES):
        token = match.group()
        if token[:1] == b'"':
            is_key = depth == 1 and token.endswith(b":")
            name = token[1 : token.rindex(b'"')].decode(errors="replace") if is_key else name
            continue
        depth += 1 if token in b"{[" else -1
        if depth > DEEP:
            return name
    return None


def _explained(errors: Sequence[ErrorDetails], model: type[RequestModel], fields: dict[str, Any]) -> InvalidRequest:
    # A misspelt name is the likely cause of a missing one, so it is reported first.
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    param = field_path(list(_sent_names(first, fields)))
    if first["type"] == "extra_forbidden":
        return InvalidRequest(_unknown(param, model), param)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param)
    return InvalidRequest(f"{param}: {first['msg']}, got {shown(first['input'])}", param)


def _sent_names(error: ErrorDetails, value: Any) -> Iterator[int | str]:
    """Yields the parts of an error's place that the request has; in unions there are names of branches between them."""
    for at, part in enumerate(error["loc"], 1):
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            value = value[part]  # type: ignore[index]  # each kind has its own index, and mypy joins them
        elif error["type"] != "missing" or at < len(error["loc"]):
            continue
        yield part


def _unknown(param: str, model: type[RequestModel]) -> str:
    names = [*model.model_fields, *model.refusals] if param.isidentifier() else []  # not of fields of a field
    close = difflib.get_close_matches(param, names, n=1, cutoff=0.65)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown field {shown(param)}{hint}"


def field_path(loc: Sequence[int | str]) -> str:
    """Writes ("messages", 0, "content") as messages[0].content."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def shown(value: object) -> str:
    """Returns the value in short for an error message, so that no prompt is repeated whole."""
    text = repr(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def refuse_unknown(fields: Mapping[str, object], known: Collection[str], path: str) -> None:
    """Raises InvalidRequest for a field of the object at `path` that is none of those."""
    for name in fields.keys() - set(known):
        raise InvalidRequest(f"unknown field {shown(name)}", f"{path}.{name}")


def text_in(fields: Mapping[str, object], name: str, path: str) -> str:
    """Returns the text that the object at `path` has under the name. Raises InvalidRequest for what is none."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"must be a text, got {shown(value)}", f"{path}.{name}")
    return value
