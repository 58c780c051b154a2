"""Gives fields that errors name the names that the request has for them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from starling_engine.errors import InvalidRequest

TOOL_NAMES = (
    (r"^(tools\[\d+\])\.function\.", r"\1."),
    (r"^tool_choice\.(function|custom)\.name$", "tool_choice.name"),
    (r"^tool_choice\.allowed_tools\.tools.*", "tool_choice.tools"),
    (r"^tool_choice\.allowed_tools", "tool_choice"),
)
"""Names of a chat's tools where an API has a function's fields in the tool itself."""


@contextmanager
def fields_named(names: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Renames the field of an InvalidRequest that is raised within: each name has an expression, and what takes its place.

    The first expression that is found counts: a field's new name may be another one's old name.
    """
    try:
        yield
    except InvalidRequest as error:
        name = own_name(error.param or "", names)
        if name is None:
            raise
        raise _named(error, name) from None


def own_name(field: str, names: Iterable[tuple[str, str]]) -> str | None:
    """Returns the other name of a field, as `fields_named` finds it; None where it has none."""
    for pattern, name in names:
        renamed, found = re.subn(pattern, name, field)
        if found:
            return renamed
    return None


@contextmanager
def errors_named(names: Mapping[str, str]) -> Iterator[None]:
    """Gives fields that the engine's errors name, and their parts, the request's own names; `names` has these by the engine's."""
    try:
        yield
    except InvalidRequest as error:
        for field, own in names.items():
            if error.param is not None and _is_within(error.param, field):
                name = own + error.param.removeprefix(field)
                raise _named(error, name) from None
        raise


def _named(error: InvalidRequest, param: str) -> InvalidRequest:
    """Returns the error with another name of its field, in its message, too."""
    return type(error)(error.message.replace(f"{error.param} must", f"{param} must"), param or None)


def _is_within(path: str, field: str) -> bool:
    """Says if the path is that of the field, or of a part of it."""
    return path == field or path.startswith((f"{field}.", f"{field}["))
