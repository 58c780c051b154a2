"""Base of every object of the API."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, JsonValue
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema
from starling_crds.rules import VALIDATIONS, Rule


def map_by(key: str) -> dict[str, JsonValue]:
    """Marks a list's field: server-side apply merges its elements by this key, and refuses two with the same."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class ApiModel(BaseModel):
    """Python names in snake_case, the API's in camelCase; a field that is not known is an error; values never change.

    RULES are what holds between fields. They go into the schema, and `parse` applies them; the constructor does not, so that
    tests and tools can hold a value that is not possible.
    """

    RULES: ClassVar[tuple[Rule, ...]] = ()

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        made = handler(schema)
        if cls.RULES:
            handler.resolve_ref_schema(made)[VALIDATIONS] = [rule.validation() for rule in cls.RULES]
        return made


class OpenModel(ApiModel):
    """An object that may hold further fields, which others check."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class ShapedBy:
    """Marks a dictionary that has the schema of a model, and is checked by `parse`; its nulls, which delete keys, are kept.

    The model comes from a function, since one of them is made of the whole spec.
    """

    model: Callable[[], type[ApiModel]]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema
        return handler(self.model().__pydantic_core_schema__)
