"""Regular expressions by which a checkpoint names modules. Those that could take for ever, as a hostile one's may, are refused."""

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined] # nothing else tells what a pattern is made of
from typing import Any

_MAX_CHARACTERS = 2_000
_MAX_REPEATS, _MAX_WIDE_REPEATS = 8, 4
"""Repeats one behind the other take time by the length of a name to their number; those of digits alone end at once."""
_DIGITS = [list(_parser.parse(digits)) for digits in (r"\d", "[0-9]")]
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Raises ValueError saying what is wrong with it, or what it may not have."""
    if len(pattern) > _MAX_CHARACTERS:
        raise ValueError(f"at most {_MAX_CHARACTERS} characters are possible")
    try:
        repeats = list(_repeats(_parser.parse(pattern)))
        if sum(map(_is_wide, repeats)) > _MAX_WIDE_REPEATS or len(repeats) > _MAX_REPEATS:
            raise ValueError(f"at most {_MAX_WIDE_REPEATS} repeats, and {_MAX_REPEATS} with those of digits, are possible")
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _repeats(tree: Any) -> Iterator[Any]:
    """Yields what is repeated more than once. Raises ValueError for repeats in a repeat, and alternatives in one."""
    for operation, argument in tree:
        repeated = operation in _REPEATS and argument[1] > 1
        if repeated:
            if any(inner in (*_REPEATS, _constants.BRANCH) for inner in _operations(argument[2])):
                raise ValueError("repeats in repeats, and alternatives in repeats, are not possible")
            yield argument[2]
        else:
            for part in _trees(argument):
                yield from _repeats(part)


def _operations(tree: Any) -> Iterator[Any]:
    for operation, argument in tree:
        yield operation
        for part in _trees(argument):
            yield from _operations(part)


def _trees(argument: Any) -> Iterator[Any]:
    """Yields the parts of an operation's argument that are patterns themselves."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for each in argument:
            yield from _trees(each)


def _is_wide(tree: Any) -> bool:
    """Says if more than digits is repeated."""
    return list(tree) not in _DIGITS
