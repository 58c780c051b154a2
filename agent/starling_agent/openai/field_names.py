"""Gives fields that errors name the names that the request has for them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from starling_engine.errors import InvalidRequest


class OwnName(NamedTuple):
    """A request's name of fields: it takes the place of `prefix` and of what the expression finds behind it."""

    pattern: str
    name: str
    prefix: str = ""


TOOL_NAMES = (
    OwnName(r"^(tools\[\d+\])\.function\.", r"\1."),
    OwnName(r"^tool_choice\.(function|custom)\.name$", "tool_choice.name"),
    OwnName(r"^tool_choice\.allowed_tools\.tools.*", "tool_choice.tools"),
    OwnName(r"^tool_choice\.allowed_tools", "tool_choice"),
)
"""Names of a chat's tools where an API has a function's fields in the tool itself."""


@contextmanager
def fields_named(names: Iterable[OwnName]) -> Iterator[None]:
    """Renames the field of an InvalidRequest that is raised within.

    The first expression that is found counts: a field's new name may be another one's old name.
    """
    try:
        yield
    except InvalidRequest as error:
        name = own_name(error.param or "", names)
        if name is None:
            raise
        raise _named(error, name) from None


def own_name(field: str, names: Iterable[OwnName]) -> str | None:
    """Returns the other name of a field, as `fields_named` finds it; None where it has none."""
    for own in names:
        if field.startswith(own.prefix):  # thousands of names are of items that the field is not in
            renamed, found = re.subn(own.pattern, own.name, field.removeprefix(own.prefix))
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
