"""Pydantic's errors in the words of the API: the path as users write it, the given value, and what is possible."""

from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from starling_crds.rules import RULE_ERROR, Problem

_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
_LENGTHS = {
    "string_too_short": ("min_length", "at least", "characters"),
    "string_too_long": ("max_length", "at most", "characters"),
    "too_short": ("min_length", "at least", "entries"),
    "too_long": ("max_length", "at most", "entries"),
}


def problems_of(error: ValidationError, model: type[BaseModel], path: str) -> list[Problem]:
    """Returns the problems of a value that was parsed as `model`; `path` is the value's."""
    return [Problem(_path_of(path, model, detail["loc"]), _message(detail, model)) for detail in error.errors(include_url=False)]


def joined(path: str, field: str) -> str:
    return f"{path}.{field}" if field else path


def _path_of(path: str, model: type[BaseModel] | None, steps: tuple[str | int, ...]) -> str:
    """Returns a path: fields follow dots; indexes, and keys of maps, which may hold dots, are in brackets."""
    for step in steps:
        if isinstance(step, int) or model is None:
            path += f"[{step}]"
        else:
            path, model = joined(path, step), _model_at(model, step)
    return path


def _message(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == RULE_ERROR:
        return detail["msg"]
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return f"unknown field; possible are {', '.join(_known_fields(model, detail['loc'][:-1]))}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, got {_shown(given)}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"must be {words} {_shown(context[bound])}, got {_shown(given)}"
    if kind in _LENGTHS:
        bound, words, unit = _LENGTHS[kind]
        return f"must have {words} {context[bound]} {unit}, got {len(given)}"
    if kind == "literal_error":
        return f"must be {context['expected'].replace(chr(39), '')}, got {_shown(given)}"
    return detail["msg"]


def _known_fields(model: type[BaseModel], steps: tuple[str | int, ...]) -> list[str]:
    for step in steps:
        inner = None if isinstance(step, int) else _model_at(model, step)
        model = inner or model
    return [info.alias or name for name, info in model.model_fields.items()]


def _model_at(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Returns the model of the field, or of the elements of its list; None for plain values and maps."""
    field = next((info for known, info in model.model_fields.items() if name in (known, info.alias)), None)
    return None if field is None else model_in(field.annotation)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the model X in X, X | None or list[X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def _shown(value: Any) -> str:
    """Returns the value as YAML writes it, cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "a map" if isinstance(value, dict) else "a list"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
