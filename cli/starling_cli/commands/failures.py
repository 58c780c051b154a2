"""Failures of commands: the cause, the fix in the last line, no traceback, exit code 1; 2 for wrong use."""

import re
from typing import NoReturn

import typer

POSITIONAL = ("model", "backends")
"""Arguments of commands that are no flags."""


def fail(cause: str, fix: str, status: int = 1) -> NoReturn:
    typer.secho(f"error: {cause}", fg=typer.colors.RED, err=True)
    typer.secho(f"fix:   {fix}", err=True)
    raise typer.Exit(status)


def _flag_fix(field: str | None, command: str) -> str:
    if field is None:
        change = "the setting that the error names"
    else:
        change = field.upper() if field in POSITIONAL else f"--{field.replace('_', '-')}"
    return f"change {change} (see starling {command} --help)"


def _named_field(message: str) -> str | None:
    """Returns the field of an error from the engine core's process, which has it only in its text."""
    match = re.match(r"([a-z]+(?:_[a-z]+)*): ", message)
    return match[1] if match else None


def fix_for(error: Exception, command: str = "serve") -> str:
    """Returns what to do about an error of the engine's under a command; the message itself says what is wrong."""
    from starling_engine.errors import ConfigError, EngineDead, ModelPackageError, UnsupportedModel, WeightError

    match error:
        case ConfigError():
            return _flag_fix(error.field or _named_field(str(error)), command)
        case UnsupportedModel():
            return "serve a model that is supported, upgrade starling, or add what it lacks: docs/models.md says how"
        case ModelPackageError():
            return "repair or uninstall the package that the error names (pip uninstall)"
        case WeightError():
            return "download the checkpoint again; --load-format dummy tries everything but the weights"
        case EngineDead():
            return "the engine core's own lines above say what happened"
    return "check the model: a folder with config.json, *.safetensors and tokenizer.json, a GGUF file, or a Hugging Face id"
