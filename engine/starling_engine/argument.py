"""Declares engine arguments: one call says an argument's default, texts and limits; checks, flags and documents come from it."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from starling_engine.byte_sizes import parse_bytes, parse_length
from starling_engine.errors import ConfigError

T = TypeVar("T")
KEY = "argument"
"""Key of a dataclass field's metadata under which its `Argument` is."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An engine argument, apart from its type and default.

    help         one line for `starling serve --help`
    description  the whole text for documents; empty where `help` says all
    panel        heading of `--help` that lists the flag; None: there is no flag
    short        short form of the flag, such as -tp
    choices      possible values; empty: any of the type
    advice       what to do instead of giving another value
    low          smallest possible number
    is_size      a number of bytes, which may also be written like "4GiB"
    is_length    a number of tokens, which may also be written like "32k"
    is_json      an object, which a flag has as JSON
    """

    help: str
    description: str = ""
    panel: str | None = None
    short: str | None = None
    choices: tuple[object, ...] = ()
    advice: str = ""
    low: int | None = None
    is_size: bool = False
    is_length: bool = False
    is_json: bool = False

    @property
    def text(self) -> str:
        """The whole text."""
        return self.description or self.help


def argument(default: T, panel: str | None, help: str, description: str = "", **limits: Any) -> T:
    """Declares a dataclass field; `limits` are further fields of Argument. The result passes for the default, as in `field`."""
    made = Argument(help=help, description=description, panel=panel, **limits)
    declared: T = field(default=default, metadata={KEY: made})
    return declared


def arguments_of(declared: type) -> dict[str, Argument]:
    """Arguments of a dataclass by name; a Literal type gives its choices."""
    return {found.name: _with_choices(found.metadata[KEY], found.type) for found in fields(declared)}


def _with_choices(found: Argument, kind: object) -> Argument:
    return replace(found, choices=get_args(kind)) if get_origin(kind) is Literal else found


def check_value(name: str, found: Argument, value: Any) -> None:
    """Raises ConfigError for a value that is no choice, or is too small. None stands for a default that is decided later."""
    if found.choices and value is not None and value not in found.choices:
        advice = f"; {found.advice}" if found.advice else ""
        raise ConfigError(f"must be one of {', '.join(map(str, found.choices))}, got {value!r}{advice}", name)
    if found.low is None or value is None:
        return
    if not isinstance(value, int | float):
        raise ConfigError(f"must be a number, got {value!r}", name)
    if value < found.low:
        raise ConfigError(f"must be at least {found.low}, got {value}", name)


def size_of(name: str, value: int | str | None) -> int | None:
    """Bytes of a size, which may be text like "4GiB". Raises ConfigError with the name and the form."""
    return _parsed(name, value, parse_bytes)


def length_of(name: str, value: int | str | None) -> int | None:
    """Tokens of a length, which may be text like "32k". Raises ConfigError with the name and the form."""
    return _parsed(name, value, parse_length)


def _parsed(name: str, value: int | str | None, parse: Callable[[str], int]) -> int | None:
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(str(error), name) from None


def documentation(arguments: dict[str, Argument]) -> str:
    """A line for each argument: its name and text."""
    width = max(map(len, arguments))
    return "\n".join(f"{name:<{width}}  {found.text}" for name, found in arguments.items())
