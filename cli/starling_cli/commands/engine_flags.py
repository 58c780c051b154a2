"""Flags of `starling serve` that set engine arguments, made from the declarations in EngineArgs."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from starling_engine.args import ARGUMENTS, MODEL, EngineArgs
from starling_engine.argument import Argument
from starling_engine.byte_sizes import parse_bytes, parse_length

Command = Callable[..., None]


def with_engine_flags(command: Command) -> Command:
    """Gives typer a flag for each engine argument with a panel; the command receives their values as `**engine`.

    Flags of the model come after the command's first parameter, which is MODEL itself; the others come last.
    """
    first, *own = (found for found in inspect.signature(command).parameters.values() if found.kind is not found.VAR_KEYWORD)
    about_model: list[inspect.Parameter] = []
    others: list[inspect.Parameter] = []
    for found in dataclasses.fields(EngineArgs):
        declared = ARGUMENTS[found.name]
        if declared.panel is not None:
            (about_model if declared.panel == MODEL else others).append(_flag(found, declared))
    parameters = [first, *about_model, *own, *others]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {found.name: found.annotation for found in parameters}
    return command


def _flag(found: dataclasses.Field[Any], declared: Argument) -> inspect.Parameter:
    kind, default = _kind(found.type), found.default
    further: dict[str, Any] = {}
    if declared.is_size:
        # typer parses a default as it parses an argument.
        kind, default = Any, None if default is None else str(default)
        further = {"parser": parse_bytes, "metavar": "SIZE"}
    if declared.is_length:
        kind, further = Any, {"parser": parse_length, "metavar": "TOKENS"}
    if declared.is_json:
        kind, further = str | None, {"metavar": "JSON"}
    option = typer.Option(*_names(found, declared), help=declared.help, rich_help_panel=declared.panel, **further)
    annotation = Annotated[kind, option]  # type: ignore[valid-type]
    return inspect.Parameter(found.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _kind(annotation: Any) -> Any:
    """The type that typer checks; choices are text to typer, since the engine refuses wrong ones with a message of its own."""
    return str if get_origin(annotation) is Literal else annotation


def _names(found: dataclasses.Field[Any], declared: Argument) -> list[str]:
    """Names of the flag. A switch that is not off by default has a negation."""
    flag = f"--{found.name.replace('_', '-')}"
    is_switch = found.type is bool or bool in get_args(found.type)
    if is_switch and found.default is not False:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return [flag, declared.short] if declared.short else [flag]
