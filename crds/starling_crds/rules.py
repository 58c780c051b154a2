"""A rule of the API, written once: in CEL for the API server, in Python for `starling plan` and the operator, with one message.

Both sides stand next to each other, so that a change of one does not miss the other. A test sends the same manifests to both.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_snake
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

VALIDATIONS = "x-kubernetes-validations"
RULE_ERROR = "rule"
_PLACEHOLDER = re.compile(r"\{([A-Za-z.]+)\}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a manifest: the field's path in camelCase, and what is possible there."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """cel       the condition over `self` (and, for what must not change, `oldSelf`)
    holds     the same over the parsed value
    message   what is possible; "{tensor}" stands for the value of `self.tensor`, "{self}" for the value itself
    field     camelCase path of the field to blame, below the object that the rule belongs to

    A rule over several fields belongs to `ApiModel.RULES`. A rule over one value annotates its type:
    `Annotated[str, Rule(...)]` is checked by pydantic and lands in the schema of every field of that type.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    field: str = ""

    def explain(self, value: Any) -> str:
        return _PLACEHOLDER.sub(lambda match: str(look_up(value, match[1])), self.message)

    def validation(self) -> dict[str, str]:
        """The rule as an entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": _PLACEHOLDER.sub(r"\1", self.message.partition(", got ")[0])}
        if _PLACEHOLDER.search(self.message):
            entry["messageExpression"] = _message_expression(self.message)
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        return entry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        made = handler(schema)
        return {**made, VALIDATIONS: [*made.get(VALIDATIONS, []), self.validation()]}

    def _check(self, value: Any) -> Any:
        if not self.holds(value):
            raise PydanticCustomError(RULE_ERROR, "{message}", {"message": self.explain(value)})
        return value


def must_match(pattern: str, message: str) -> Rule:
    """The whole string must match. Rather than OpenAPI's `pattern`, whose error shows the expression and no example."""
    return Rule(
        cel=f"self.matches(r'{pattern}')",
        holds=lambda value: re.fullmatch(pattern, value) is not None,
        message=f'{message}, got "{{self}}"',
    )


def must_not_match(pattern: str, message: str) -> Rule:
    """No part of the string may match."""
    return Rule(
        cel=f"!self.matches(r'{pattern}')",
        holds=lambda value: re.search(pattern, value) is None,
        message=f'{message}, got "{{self}}"',
    )


def forbidden(message: str) -> Rule:
    """Refuses a name that people try and that is set elsewhere: the message says where."""
    return Rule(cel="false", holds=lambda _: False, message=message)


def look_up(value: Any, path: str) -> Any:
    """Returns the value at a camelCase path; None where an object on the way is missing."""
    for name in () if path == "self" else path.split("."):
        value = None if value is None else getattr(value, to_snake(name))
    return value


def _message_expression(message: str) -> str:
    """Message with values, made by `format`: the API server cannot bound the cost of string(int), and refuses sums of it."""
    parts = _PLACEHOLDER.split(message)
    text = "%s".join(part.replace("%", "%%") for part in parts[::2])
    values = (path if path == "self" else f"self.{path}" for path in parts[1::2])
    return f"{_cel_string(text)}.format([{', '.join(values)}])"


def _cel_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
