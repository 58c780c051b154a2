"""Types as people write them for structured output, each with values that are valid: pydantic 2 makes the schemas."""

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

Item = TypeVar("Item")
WHEN = "2024-02-29T12:30:00Z"


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    x: int
    y: float = 0.5


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    tags: list[str] = []


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Shape(BaseModel):
    corners: list[Point]
    center: Point | None = None


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Page(BaseModel, Generic[Item]):
    items: list[Item]
    total: Annotated[int, Field(ge=0)]


class Aliased(BaseModel):
    first_name: str = Field(alias="firstName", title="Given name", description="As in the passport", examples=["Ada"])


class Titled(BaseModel):
    title: str
    description: str
    default: int
    format: str = Field(alias="x-format")


class Bounded(BaseModel):
    count: Annotated[int, Field(gt=0, le=10, multiple_of=2)]
    share: Annotated[float, Field(ge=0, le=1)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d{3}$")]
    name: Annotated[str, Field(min_length=1, max_length=8)]
    parts: Annotated[list[int], Field(min_length=1, max_length=3)]


class Movie(TypedDict):
    name: str
    year: int


class Pair(NamedTuple):
    left: int
    right: str


@dataclass
class Record:
    name: str
    score: float = 0.0


class Add(BaseModel):
    op: Literal["add"]
    left: "Expression"
    right: "Expression"


class Number(BaseModel):
    op: Literal["number"]
    value: float


Expression = Annotated[Add | Number, Field(discriminator="op")]
Add.model_rebuild()
Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
CAT, DOG = {"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}
EMAIL = Annotated[str, Field(pattern=r"^[\w.+-]+@[\w-]+\.[\w.-]+$")]

PYDANTIC: dict[str, tuple[Any, list[Any]]] = {
    "str": (str, ["", "é\n"]),
    "int": (int, [0, -7]),
    "float": (float, [0.5, -1e3, 3]),
    "bool": (bool, [True]),
    "None": (None, [None]),
    "Any": (Any, [1, "a", [None], {"a": {}}]),
    "list": (list[int], [[], [1, 2]]),
    "list of lists": (list[list[str]], [[["a"], []]]),
    "set": (set[str], []),
    "frozenset": (frozenset[int], []),
    "set of an enum": (set[Color], [[], ["blue"], ["blue", "red"]]),
    "tuple": (tuple[int, str], [[1, "a"]]),
    "tuple of any length": (tuple[int, ...], [[], [1, 2, 3]]),
    "union": (int | str, [1, "a"]),
    "union of models": (Point | Strict, [{"x": 1, "y": 2.5}, {"name": "a"}]),
    "optional": (int | None, [1, None]),
    "discriminated union": (Pet, [CAT, DOG]),
    "list of a discriminated union": (list[Pet], [[CAT, DOG]]),
    "recursive discriminated union": (
        Expression,
        [{"op": "add", "left": {"op": "number", "value": 1}, "right": {"op": "number", "value": 2}}],
    ),
    "date": (date, ["2024-02-29"]),
    "datetime": (datetime, [WHEN, "2024-02-29T12:30:00.25+01:00"]),
    "time": (time, ["12:30:00Z"]),
    "timedelta": (timedelta, ["P1DT2H", "PT0S"]),
    "UUID": (UUID, ["123e4567-e89b-42d3-a456-426614174000"]),
    "Decimal": (Decimal, [1.5, "1.5"]),
    "Enum": (Color, ["red"]),
    "IntEnum": (Level, [2]),
    "Literal": (Literal["a", 1, None], ["a", 1, None]),
    "nested model": (Shape, [{"corners": [{"x": 1}]}, {"corners": [], "center": {"x": 1, "y": 2}}]),
    "recursive model": (Tree, [{"value": 1, "children": [{"value": 2, "children": []}]}]),
    "dict": (dict[str, int], [{}, {"a": 1, "b": 2}]),
    "dict of models": (dict[str, Point], [{"a": {"x": 1}}]),
    "dict with keys of an enum": (dict[Color, int], [{}, {"red": 1}]),
    "dict with keys of a pattern": (dict[Annotated[str, Field(pattern="^[a-z]+$")], int], [{"abc": 1}]),
    "dict with UUIDs as keys": (dict[UUID, int], [{"123e4567-e89b-42d3-a456-426614174000": 1}]),
    "bounded fields": (Bounded, [{"count": 4, "share": 0.25, "code": "AB123", "name": "n", "parts": [1]}]),
    "bytes": (bytes, ["abc"]),
    "Path": (Path, ["/tmp/a"]),
    "AnyUrl": (AnyUrl, ["https://example.com/a?b=c"]),
    "email as a pattern": (EMAIL, ["ada@example.com"]),
    "TypedDict": (Movie, [{"name": "a", "year": 1}]),
    "NamedTuple": (Pair, [[1, "a"]]),
    "dataclass": (Record, [{"name": "a"}, {"name": "a", "score": 1.5}]),
    "generic model": (Page[Point], [{"items": [{"x": 1}], "total": 1}]),
    "alias": (Aliased, [{"firstName": "Ada"}]),
    "properties named as annotations": (Titled, [{"title": "a", "description": "b", "default": 1, "x-format": "c"}]),
    "extra is forbidden": (Strict, [{"name": "a", "tags": ["b"]}]),
    "extra is allowed": (Open, [{"name": "a", "more": [1]}]),
    "number above zero": (Annotated[float, Field(gt=0)], [0.1, 5]),
    "number between integers": (Annotated[float, Field(gt=0, le=0.5)], []),
}
OPENAPI: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "nullable": ({"type": "string", "nullable": True, "example": "a"}, ["a", None]),
    "nullable reference": (
        {"nullable": True, "allOf": [{"$ref": "#/definitions/a"}], "definitions": {"a": {"type": "integer", "format": "int32"}}},
        [1, None],
    ),
    "exclusive flag": ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "format": "double"}, [0.5]),
    "oneOf with a discriminator": (
        {
            "oneOf": [{"$ref": "#/definitions/Cat"}, {"$ref": "#/definitions/Dog"}],
            "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/definitions/Cat"}},
            "definitions": {
                "Cat": {"type": "object", "required": ["kind"], "properties": {"kind": {"type": "string", "enum": ["cat"]}}},
                "Dog": {"type": "object", "required": ["kind"], "properties": {"kind": {"type": "string", "enum": ["dog"]}}},
            },
        },
        [{"kind": "cat"}, {"kind": "dog"}],
    ),
    "inheritance": (
        {
            "allOf": [
                {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer", "format": "int64"}}},
                {"type": "object", "properties": {"name": {"type": "string"}}, "xml": {"name": "pet"}},
            ]
        },
        [{"id": 1}, {"id": 1, "name": "a"}],
    ),
    "one of two properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 2}],
    ),
    "at least one property": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        [{"a": 1}, {"a": 1, "b": 2}],
    ),
    "condition": (
        {
            "type": "object",
            "properties": {"country": {"enum": ["US", "NL"]}, "code": {"type": "string"}},
            "required": ["country", "code"],
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}},
            "else": {"properties": {"code": {"pattern": "^[0-9]{4}[A-Z]{2}$"}}},
        },
        [{"country": "US", "code": "12345"}, {"country": "NL", "code": "1234AB"}],
    ),
}


def schemas() -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Returns schemas and valid values by name."""
    made = {name: (TypeAdapter(kind).json_schema(), values) for name, (kind, values) in PYDANTIC.items()}
    return {**made, **{f"OpenAPI: {name}": schema for name, schema in OPENAPI.items()}}
