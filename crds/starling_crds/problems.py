"""Checks of a spec as an API server makes them, for `starling plan` and `starling up`."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from starling_crds.errors import joined, problems_of
from starling_crds.rules import Problem
from starling_crds.v1alpha1.base import ApiModel, ShapedBy


def problems(spec: ApiModel, path: str = "spec") -> list[Problem]:
    """Returns the broken rules of this object and of those in it. Rules about changes need an API server."""
    found = [Problem(joined(path, rule.field), rule.explain(spec)) for rule in spec.RULES if not rule.holds(spec)]
    for name, info in type(spec).model_fields.items():
        found += _inside(getattr(spec, name), info, joined(path, info.alias or name))
    return found


def _inside(value: Any, info: FieldInfo, path: str) -> Iterator[Problem]:
    if isinstance(value, ApiModel):
        yield from problems(value, path)
    elif isinstance(value, list):
        for position, element in enumerate(value):
            if isinstance(element, ApiModel):
                yield from problems(element, f"{path}[{position}]")
    for shape in (entry for entry in info.metadata if isinstance(entry, ShapedBy)):
        yield from _of_shape(value, shape.model(), path)


def _of_shape(value: dict[str, Any], model: type[ApiModel], path: str) -> list[Problem]:
    try:
        return problems(model.model_validate(value, strict=True, by_alias=True, by_name=False), path)
    except ValidationError as error:
        return problems_of(error, model, path)
