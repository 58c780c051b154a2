"""Gives fields that errors name the names that another API has for them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starling_engine.errors import InvalidRequest

TOOL_NAMES = (
    (r"^(tools\[\d+\])\.function\.", r"\1."),
    (r"^tool_choice\.function\.name$", "tool_choice.name"),
)
"""Names of a chat's tools where an API has a function's fields in the tool itself."""


@contextmanager
def fields_named(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Renames the field of an InvalidRequest that is raised within: each name has an expression, and what takes its place."""
    try:
        yield
    except InvalidRequest as error:
        param = error.param or ""
        for pattern, name in names:
            param = re.sub(pattern, name, param)
        raise type(error)(error.message, param or None) from None
