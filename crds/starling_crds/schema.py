"""Conversion of pydantic's JSON Schema to the structural schema that Kubernetes wants.

No $ref, no anyOf: an optional field is one that may be missing, never null. What CEL has to know (lengths, sizes) stays; titles go.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from starling_crds.rules import VALIDATIONS

Schema = dict[str, Any]

_INT32 = range(-(2**31), 2**31)
_KEPT = (
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "enum",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    VALIDATIONS,
)


def structural(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """Returns the schema of a model. `defaults`: the API server fills them in; not in a status, which has one writer."""
    whole = model.model_json_schema(by_alias=True, mode="validation")
    return _Conversion(whole.get("$defs", {}), defaults).convert(whole)


class _Conversion:
    """Conversion of one document with its definitions."""

    def __init__(self, definitions: Mapping[str, Schema], defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults

    def convert(self, node: Schema) -> Schema:
        node = self._resolved(node)
        made: Schema = {"description": node["description"]} if "description" in node else {}
        made |= {"type": node["type"]} if "type" in node else {}
        made |= {"enum": [node["const"]]} if "const" in node else {}
        made |= _format(node) | {key: node[key] for key in _KEPT if key in node} | _exclusive(node)
        if self._defaults and node.get("default") is not None:
            made["default"] = node["default"]
        return made | self._children(node)

    def _resolved(self, node: Schema) -> Schema:
        """Resolves references and Optional. A description next to them wins; rules are added."""
        if "$ref" in node:
            beside = {key: value for key, value in node.items() if key != "$ref"}
            return self._resolved(_joined(self._definitions[node["$ref"].rpartition("/")[2]], beside))
        if "anyOf" in node:
            beside = {key: value for key, value in node.items() if key != "anyOf"}
            (kind,) = (kind for kind in node["anyOf"] if kind.get("type") != "null")
            return self._resolved(_joined(kind, beside))
        return node

    def _children(self, node: Schema) -> Schema:
        if node.get("type") == "array":
            return {"items": self.convert(node["items"])}
        further = node.get("additionalProperties")
        if isinstance(further, dict):
            return {"additionalProperties": self.convert(further)}
        made: Schema = {"x-kubernetes-preserve-unknown-fields": True} if further is True else {}
        if "properties" in node:
            made["properties"] = {name: self._property(child) for name, child in node["properties"].items()}
        return made

    def _property(self, node: Schema) -> Schema:
        made = self.convert(node)
        may_be_missing = any(kind.get("type") == "null" for kind in node.get("anyOf", ()))
        if self._defaults and not may_be_missing and not made.get("required") and (filled := _object_default(made)):
            made["default"] = filled
        return made


def _joined(inner: Schema, outer: Schema) -> Schema:
    rules = [*inner.get(VALIDATIONS, []), *outer.get(VALIDATIONS, [])]
    return inner | outer | ({VALIDATIONS: rules} if rules else {})


def _format(node: Schema) -> Schema:
    if node.get("type") == "number":
        return {"format": "double"}
    if node.get("type") != "integer":
        return {}
    bounds = node.get("enum") or (node.get("minimum"), node.get("maximum"))
    return {"format": "int32" if all(bound in _INT32 for bound in bounds if bound is not None) and None not in bounds else "int64"}


def _exclusive(node: Schema) -> Schema:
    """Returns exclusive bounds in the form of OpenAPI 3.0: a bound and a flag."""
    made: Schema = {}
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if flag in node:
            made |= {bound: node[flag], flag: True}
    return made


def _object_default(made: Schema) -> Schema:
    """Returns the default of an object that is never None: those of its fields. So it always exists, and rules may read its fields.

    It is written out because the API server applies rules to a default before it fills in those of fields.
    """
    return {name: child["default"] for name, child in made.get("properties", {}).items() if "default" in child}
