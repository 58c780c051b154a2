"""`starling kv`: the folder of the filesystem tier, for people. Engines may use it meanwhile."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starling_cli.commands.failures import fail

if TYPE_CHECKING:
    from starling_engine.kv_offload.secondary.folder.inspect import CachedModel

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def parse_age(text: str) -> float:
    """Returns the seconds of 7d, 12h, 30m, 2w or 90s. Raises ValueError with what is possible."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no age; write it like 7d, 12h or 30m")
    return float(match[1]) * _AGES[match[2]]


app = typer.Typer(help="Look after a folder of cached keys and values (--kv-fs-path).", no_args_is_help=True, rich_markup_mode=None)

Folder = Annotated[Path, typer.Argument(metavar="PATH", help="The folder that --kv-fs-path names.")]
Age = Annotated[
    Any, typer.Option("--older-than", parser=parse_age, metavar="AGE", help="Only what was last used so long ago: 7d, 12h.")
]
YOURS = "name the folder that --kv-fs-path names, mounted and yours to change"
DATE = "%Y-%m-%d %H:%M"


@app.command()
def ls(
    path: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show what the folder holds of which model."""
    with _reported_problems(path):
        from starling_engine.kv_offload.secondary.folder.inspect import list_models

        models = list_models(path)
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in models], indent=2, ensure_ascii=False))
        return
    for line in _table(models):
        typer.echo(line)


@app.command()
def verify(
    path: Folder,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is damaged.")] = False,
) -> None:
    """Read everything and compare all checksums. Exit status 1 when anything is damaged or cannot be read."""
    objects = held = damaged = unknown = 0
    with _reported_problems(path):
        from starling_engine.kv_offload.secondary.folder.inspect import verify as verified

        for found, wrong in verified(path):
            objects, held = objects + 1, held + found.size
            if isinstance(wrong, OSError):
                unknown += 1
                typer.echo(f"{found.path} cannot be read: {wrong.strerror}")
            elif wrong is not None:
                damaged += 1
                typer.echo(f"{found.path} {wrong}")
                if delete:
                    Path(found.path).unlink(missing_ok=True)
    unread = f", {unknown} that cannot be read" if unknown else ""
    typer.echo(f"{objects} objects, {format_bytes(held)}, {damaged} damaged{' and removed' if damaged and delete else ''}{unread}")
    if damaged or unknown:
        raise typer.Exit(1)


@app.command()
def purge(
    path: Folder,
    model: Annotated[
        str, typer.Option("--model", metavar="FINGERPRINT", help="Only this model's: how its fingerprint begins.")
    ] = "",
    older_than: Age = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove objects: all, one model's, or what has not been used for long. Exit status 1 when any of these stays."""
    with _reported_problems(path):
        from starling_engine.kv_offload.secondary.folder.inspect import list_models
        from starling_engine.kv_offload.secondary.folder.inspect import purge as purged

        if not yes:
            _confirm(list_models(path), path, model, older_than)
        before = float("inf") if older_than is None else time.time() - older_than
        tried = list(purged(path, model, before))
    sizes = [found.size for found, refused in tried if refused is None]
    typer.echo(f"removed {len(sizes)} objects, {format_bytes(sum(sizes))}")
    stayed = [(found, refused) for found, refused in tried if refused is not None]
    if stayed:
        found, refused = stayed[0]
        fail(f"{len(stayed)} objects could not be removed, the first is {found.path}: {refused.strerror}", YOURS)


def _confirm(models: "list[CachedModel]", path: Path, prefix: str, older_than: float | None) -> None:
    """Asks whether to remove. Raises Abort when the answer is no."""
    meant = [model for model in models if model.fingerprint.startswith(prefix)]
    held = f"{sum(model.objects for model in meant)} objects, {format_bytes(sum(model.bytes for model in meant))}"
    age = "" if older_than is None else ", as far as not used lately"
    typer.confirm(f"Remove from {path} {held} of {len(meant)} models{age}?", abort=True)


def _table(models: "list[CachedModel]") -> Iterator[str]:
    yield f"{'FINGERPRINT':<18}{'OBJECTS':>9}{'SIZE':>12}  {'OLDEST':<18}{'NEWEST':<18}MODEL"
    for model in models:
        oldest, newest = (time.strftime(DATE, time.localtime(at)) for at in (model.oldest, model.newest))
        name = f"{model.model} {model.dtype}"
        yield f"{model.fingerprint:<18}{model.objects:>9}{format_bytes(model.bytes):>12}  {oldest:<18}{newest:<18}{name}"
    objects, held = sum(model.objects for model in models), sum(model.bytes for model in models)
    yield f"{'total':<18}{objects:>9}{format_bytes(held):>12}"


def format_bytes(size: int) -> str:
    """Returns a text like 1.50 GiB, 12.00 KiB or 300 B."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit}"
    return f"{size} B"


@contextmanager
def _reported_problems(path: Path) -> Iterator[None]:
    """Reports problems of the folder or the installation without a traceback. Exit status 2 for a path that is no cache."""
    try:
        from starling_engine.kv_offload.secondary.folder.inspect import NoFolder
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed", "pip install 'starling[agent]'")
    try:
        yield
    except NoFolder as error:
        fail(str(error), YOURS, status=2)
    except BrokenPipeError:  # the reader has closed the pipe, which typer knows how to end
        raise
    except OSError as error:
        fail(f"{error.filename or path}: {error.strerror}", YOURS)
