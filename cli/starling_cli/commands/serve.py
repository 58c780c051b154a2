"""`starling serve MODEL`: the engine and its endpoint in this terminal. Flags have vLLM's names where they mean the same."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from starling_crds import rate
from starling_engine.args import ARGUMENTS, EngineArgs
from starling_engine.byte_sizes import parse_bytes
from starling_engine.core import launcher
from starling_engine.errors import StarlingError

from starling_cli.commands.engine_flags import with_engine_flags
from starling_cli.commands.failures import fail, fix_for

if TYPE_CHECKING:
    from starling_agent.settings import RateLimit, ServerSettings


def _option(flag: str, text: str, **further: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Endpoint", **further)


def parse_rate(text: str) -> "RateLimit":
    """Parses 10/s, 600/m or 100/30s. Raises ValueError with what is possible."""
    from starling_agent.settings import RateLimit

    return RateLimit(*rate.parse_rate(text))


@with_engine_flags
def serve(
    model: Annotated[str, typer.Argument(help=ARGUMENTS["model"].help)],
    host: Annotated[str, _option("--host", "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _option("--port", "Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _option("--served-model-name", "Name for requests' `model`; may be repeated."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option("--api-key", "Key that requests must bring; may be repeated. Also $STARLING_API_KEY."),
    ] = None,
    api_key_file: Annotated[Path | None, _option("--api-key-file", "File with one key a line.")] = None,
    allowed_origins: Annotated[list[str] | None, _option("--allowed-origins", "Origin for CORS, or *; may be repeated.")] = None,
    allowed_hosts: Annotated[
        list[str] | None, _option("--allowed-hosts", "Name in requests' Host, or *.NAME; may be repeated.")
    ] = None,
    prefix_cache_salt: Annotated[str, _option("--prefix-cache-salt", "key: API keys share no cached prefix; or none.")] = "key",
    rate_limit: Annotated[
        Any, _option("--rate-limit", "Of each key or address: 10/s, 600/m, 100/30s.", parser=parse_rate, metavar="RATE")
    ] = None,
    max_body_bytes: Annotated[
        int, _option("--max-body-bytes", "Largest request body.", parser=parse_bytes, metavar="SIZE")
    ] = "32MiB",  # type: ignore[assignment]  # typer parses defaults as it parses arguments
    read_seconds: Annotated[float, _option("--read-seconds", "For a request's header, and its body: plus a second a KiB.")] = 20.0,
    connection_seconds: Annotated[
        float, _option("--connection-seconds", "An older connection is closed with its next answer; 0: never.")
    ] = 120.0,
    trust_chat_template: Annotated[bool, _option("--trust-request-chat-template", "Accept chat templates in requests.")] = False,
    tool_call_parser: Annotated[
        str, _option("--tool-call-parser", "Format of tool calls, by vLLM's names; auto: the chat template's; none.")
    ] = "auto",
    reasoning_parser: Annotated[str, _option("--reasoning-parser", "Format that marks reasoning, likewise.")] = "auto",
    whole_tool_calls: Annotated[
        bool, _option("--whole-tool-calls", "Send a tool call when it is complete, and none that was cut.")
    ] = False,
    max_stored_bytes: Annotated[
        int, _option("--max-stored-bytes", "Room for responses that can be continued.", parser=parse_bytes, metavar="SIZE")
    ] = "64MiB",  # type: ignore[assignment]  # as above
    stored_response_seconds: Annotated[
        float, _option("--stored-response-seconds", "A response is stored for so long; 30 days.")
    ] = 30 * 86_400.0,
    response_store: Annotated[
        Path | None, _option("--response-store", "Folder for them, which servers may share; else memory.")
    ] = None,
    router_token_file: Annotated[
        Path | None, _option("--router-token-file", "Token by which routers may resume streams here, and are told what is cached.")
    ] = None,
    accept_seconds: Annotated[
        float,
        _option(
            "--accept-seconds",
            "After SIGTERM requests are accepted for at least so long, and on while they come: to half of the drain.",
        ),
    ] = 5.0,
    drain_seconds: Annotated[float, _option("--drain-seconds", "After that open requests may take so long to finish.")] = 120.0,
    log_level: Annotated[str, _option("--log-level", "debug, info, warning or error.")] = "info",
    log_requests: Annotated[bool, _option("--enable-log-requests", "Log each request's parameters.")] = False,
    log_prompts: Annotated[bool, _option("--enable-log-prompts", "And its prompt.")] = False,
    access_log: Annotated[bool, _option("--access-log/--no-access-log", "A line for each answer.")] = True,
    **engine: Any,
) -> None:
    """Serve MODEL over OpenAI's API."""
    flags = locals()
    own = {name: value for name, value in flags.items() if name not in ("model", "engine")}
    try:
        args = EngineArgs(model=model, **engine)
        if args.tensor_parallel_size * args.pipeline_parallel_size > 1 or args.enable_expert_parallel:
            launcher.end_ahead()  # ranks will be processes of their own, and the core needs no torch
        code = _run(args, _server_settings(**own), log_level)
    except StarlingError as error:
        fail(str(error), fix_for(error))
    raise typer.Exit(code)


def _server_settings(
    *,
    served_model_name: list[str] | None,
    api_key: list[str] | None,
    api_key_file: Path | None,
    allowed_origins: list[str] | None,
    allowed_hosts: list[str] | None,
    router_token_file: Path | None,
    **others: Any,
) -> "ServerSettings":
    """The settings; `others` have the same names as their flags."""
    from starling_agent.api_keys import ApiKeys
    from starling_agent.file_token import FileToken
    from starling_agent.settings import ServerSettings

    return ServerSettings(
        served_model_names=tuple(served_model_name or ()),
        api_keys=ApiKeys(api_key or (), api_key_file),
        allowed_origins=tuple(allowed_origins or ()),
        allowed_hosts=tuple(allowed_hosts or ()),
        router_token=None if router_token_file is None else FileToken.required(router_token_file, "router_token_file"),
        **others,
    )


def _run(args: EngineArgs, settings: "ServerSettings", log_level: str) -> int:
    import asyncio

    import uvloop
    from starling_agent.logs import configure_logs
    from starling_agent.serve import StoppedWhileLoading
    from starling_agent.serve import serve as serve_until_signal

    from starling_cli.commands.progress import StartReport

    configure_logs(log_level)
    try:
        with StartReport(args.model) as report, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve_until_signal(args, settings, report))
    except StoppedWhileLoading:
        typer.echo("stopped before the model was loaded", err=True)
        return 0
