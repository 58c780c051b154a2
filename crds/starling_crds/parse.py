"""An InferenceService's manifest, parsed as the API server would: all its problems, each with the path of its field."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from starling_crds.errors import joined, model_in, problems_of
from starling_crds.manifest import GROUP, KIND, VERSION
from starling_crds.rules import Problem
from starling_crds.v1alpha1.base import ApiModel, ShapedBy
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.strings import SERVICE_NAME

_API_VERSION = f"{GROUP}/{VERSION}"
_TOP = ("apiVersion", "kind", "metadata", "spec", "status")


@dataclass(frozen=True)
class Parsed:
    """`spec` is None if and only if there are problems."""

    spec: InferenceServiceSpec | None
    problems: tuple[Problem, ...] = ()

    @property
    def error(self) -> str | None:
        return "; ".join(map(str, self.problems)) or None


def parse(body: Mapping[str, Any]) -> Parsed:
    """Parses a manifest. Never raises: what is wrong is in `problems`."""
    found = [*_envelope_problems(body), *_name_problems(body)]
    spec = body.get("spec")
    if not isinstance(spec, Mapping):
        return Parsed(None, (*found, Problem("spec", "is required, and must be a map")))
    parsed = parse_spec(spec)
    found += parsed.problems
    return Parsed(None, tuple(found)) if found else parsed


def parse_spec(spec: Mapping[str, Any]) -> Parsed:
    """Parses `spec` alone, as an API server has it in store."""
    try:
        made = InferenceServiceSpec.model_validate(
            _without_nulls(dict(spec), InferenceServiceSpec), strict=True, by_alias=True, by_name=False
        )
    except ValidationError as error:
        return Parsed(None, tuple(problems_of(error, InferenceServiceSpec, "spec")))
    found = _broken_rules(made)
    return Parsed(None, tuple(found)) if found else Parsed(made)


def _envelope_problems(body: Mapping[str, Any]) -> list[Problem]:
    wanted = {"apiVersion": _API_VERSION, "kind": KIND}
    found = [Problem(name, f"must be {value}, got {body.get(name)}") for name, value in wanted.items() if body.get(name) != value]
    unknown = [name for name in body if name not in _TOP]
    return found + [Problem(str(name), f"unknown field; possible are {', '.join(_TOP)}") for name in unknown]


def _name_problems(body: Mapping[str, Any]) -> list[Problem]:
    metadata = body.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str):
        return [Problem("metadata.name", "is required")]
    return [] if SERVICE_NAME.holds(name) else [Problem("metadata.name", SERVICE_NAME.explain(name))]


def _broken_rules(spec: ApiModel, path: str = "spec") -> list[Problem]:
    """Returns the broken rules of this object and of those in it. Rules about changes need an API server."""
    found = [Problem(joined(path, rule.field), rule.explain(spec)) for rule in spec.RULES if not rule.holds(spec)]
    for name, info in type(spec).model_fields.items():
        found += _inside(getattr(spec, name), info, joined(path, info.alias or name))
    return found


def _inside(value: Any, info: FieldInfo, path: str) -> Iterator[Problem]:
    if isinstance(value, ApiModel):
        yield from _broken_rules(value, path)
    elif isinstance(value, list):
        for position, element in enumerate(value):
            if isinstance(element, ApiModel):
                yield from _broken_rules(element, f"{path}[{position}]")
    for shape in (entry for entry in info.metadata if isinstance(entry, ShapedBy)):
        yield from _problems_of_shape(value, shape.model(), path)


def _problems_of_shape(value: dict[str, Any], model: type[ApiModel], path: str) -> list[Problem]:
    try:
        return _broken_rules(model.model_validate(value, strict=True, by_alias=True, by_name=False), path)
    except ValidationError as error:
        return problems_of(error, model, path)


def _without_nulls(value: Any, model: type[BaseModel]) -> Any:
    """Removes nulls, which mean a missing field to the API server too. In free-form maps they have a meaning, and stay."""
    if not isinstance(value, dict):
        return value
    fields = {info.alias: info for info in model.model_fields.values()}
    return {name: _inner(entry, fields.get(name)) for name, entry in value.items() if entry is not None or name not in fields}


def _inner(value: Any, field: FieldInfo | None) -> Any:
    inner = model_in(field.annotation) if field is not None else None
    return value if inner is None else _without_nulls(value, inner)
