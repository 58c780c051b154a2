"""`starling up`: an InferenceService on this machine, by the same plan that the operator follows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from starling_cli.commands.failures import fail
from starling_cli.commands.flags import Output, TableOrJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starling_cli.local.display import StatusDisplay
    from starling_cli.local.loop import UpOptions
    from starling_cli.local.service_file import LoadedService
    from starling_cli.local.sources import PathMap

DEFAULT_PORT = 8000
FIRST_UNPRIVILEGED = 1024


def up(
    file: Annotated[Path, typer.Option("-f", "--file", help="The manifest. It is read again whenever it changes.")],
    name: Annotated[str | None, typer.Option("--name", help="Which InferenceService, where the file has several.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help=f"Port of the OpenAI endpoint; 0 takes a free one. Default: spec.endpoint.port from 1024 on, else {DEFAULT_PORT}.",
        ),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            help="A folder in place of a path in the pods or of a claim: /opt/starling/models=./models, pvc://weights=/data."
            " May be repeated. /opt/starling/models, the models in the agent's image, is ./models unless mapped.",
        ),
    ] = None,
    logs: Annotated[Path | None, typer.Option("--logs", help="Folder for the agents' logs. Default: they go with the run.")] = None,
    output: Output = TableOrJson.TABLE,
) -> None:
    """Run a service on this machine: processes in place of pods, the same plan, no cluster. Ctrl-C drains and ends."""
    import asyncio

    from starling_cli.local.display import make_display
    from starling_cli.local.loop import run

    options, loaded = _prepared(file, name, host, port, maps or [], logs)
    display = make_display(output is TableOrJson.JSON)
    try:
        _note_unused(display, loaded)
        code = asyncio.run(run(options, loaded, display))
    except OSError as error:
        display.close()
        fail(f"{host}:{options.port} cannot be listened on: {error.strerror or error}", "give another --port; 0 takes a free one")
    finally:
        display.close()
    raise typer.Exit(code)


def _prepared(
    file: Path, name: str | None, host: str, port: int | None, maps: list[str], logs: Path | None
) -> "tuple[UpOptions, LoadedService]":
    """Returns the options and the service. Everything that can be wrong is found before anything starts."""
    from starling_engine import env

    from starling_cli.local.loop import UpOptions
    from starling_cli.local.service_file import load_service
    from starling_cli.local.sources import default_maps, parse_map

    try:
        mapped = (*(parse_map(text) for text in maps), *default_maps(file, Path.cwd()))
    except ValueError as error:
        fail(f"--map: {error}", "write --map FROM=FOLDER")
    loaded = load_service(file, name, mapped)
    if loaded.service.spec is None:
        why = loaded.service.spec_error or ""
        cause = why if why.startswith(str(file)) else f"{file}: {why}"
        fail(cause, "correct the file; `starling plan -f` shows what it means")
    _check_plan(file, loaded, mapped)
    chosen = port if port is not None else _port_of(loaded)
    weights = env.cache_dir() / "weights"
    return UpOptions(file, loaded.service.name, host, chosen, mapped, weights, logs), loaded


def _check_plan(file: Path, loaded: "LoadedService", maps: "Sequence[PathMap]") -> None:
    """Refuses at once what the operator or an agent would. After an edit the table shows it, and what runs goes on."""
    from starling_cli.local.machine import SETTINGS
    from starling_cli.local.model_check import model_refusal
    from starling_cli.planning.planned import CannotPlan, plan_of

    try:
        refused = plan_of(loaded.service, SETTINGS.agent_image).refused or model_refusal(loaded.service, maps)
    except CannotPlan as error:
        refused = str(error)
    if refused:
        fail(f"{file}: {refused}", "correct the field that is named")


def _port_of(loaded: "LoadedService") -> int:
    """Returns the port to listen on. One below 1024 is for the cluster's Service, which has an address of its own."""
    assert loaded.service.spec is not None
    wanted = loaded.service.spec.endpoint.port
    return wanted if wanted >= FIRST_UNPRIVILEGED else DEFAULT_PORT


def _note_unused(display: "StatusDisplay", loaded: "LoadedService") -> None:
    from starling_cli.local.launch import unused_here

    spec = loaded.service.spec
    assert spec is not None
    if unused := unused_here(spec):
        display.note(f"without meaning on one machine, so not used here: {', '.join(unused)}")
