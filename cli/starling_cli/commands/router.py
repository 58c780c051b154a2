"""`starling router URL...`: one endpoint in front of several servers; each request goes where its prefix is cached."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from starling_engine.byte_sizes import parse_bytes
from starling_engine.errors import StarlingError

from starling_cli.commands.failures import fail, fix_for


def router(
    backends: Annotated[
        list[str] | None, typer.Argument(help="URLs of servers, such as http://127.0.0.1:8001.", show_default=False)
    ] = None,
    backends_service: Annotated[
        str | None, typer.Option("--backends-service", help="Name whose addresses, looked up every second, are servers too.")
    ] = None,
    backends_port: Annotated[int, typer.Option("--backends-port", min=1, max=65_535, help="Port of the servers there.")] = 8000,
    backends_file: Annotated[
        Path | None,
        typer.Option("--backends-file", help="File with URLs of servers, one a line. It is read again whenever it changes."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The servers' model, for its tokenizer. Default: servers with the router's token tell it."),
    ] = None,
    prefix_weight: Annotated[
        float, typer.Option("--prefix-weight", min=0, help="Of a cached prefix; 0: none is looked for.")
    ] = 2.0,
    load_weight: Annotated[float, typer.Option("--load-weight", min=0, help="Of the work that a server has.")] = 1.0,
    session_weight: Annotated[
        float, typer.Option("--session-weight", min=0, help="Of the server that had the session (X-Session-Id) last.")
    ] = 1.0,
    hold_requests: Annotated[
        int, typer.Option("--hold-requests", min=0, help="Requests that wait here while no server takes them; 0: none waits.")
    ] = 1000,
    hold_bytes: Annotated[
        int, typer.Option("--hold-bytes", help="Of the bodies of those that wait.", parser=parse_bytes, metavar="SIZE")
    ] = "256MiB",  # type: ignore[assignment]  # as below
    hold_seconds: Annotated[float, typer.Option("--hold-seconds", min=0, help="A request waits so long at most.")] = 60.0,
    shadow_share: Annotated[
        float,
        typer.Option("--shadow-share", min=0, max=1, help="Of requests that are asked again to compare a canary's tokens."),
    ] = 0.1,
    canary_file: Annotated[
        Path | None,
        typer.Option("--canary-file", help="JSON file with the canary that runs, until the operator tells it; it may be missing."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="Key that requests must bring, here and there; may be repeated. Also $STARLING_API_KEY."),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="File with one key a line.")] = None,
    router_token_file: Annotated[
        Path | None,
        typer.Option(
            "--router-token-file", help="Token that the servers share: they tell what they have cached, and resume streams."
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option("--allowed-origins", help="Origin for CORS, or *; may be repeated.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option("--allowed-hosts", help="Name in requests' Host, or *.NAME; may be repeated.")
    ] = None,
    tenants_file: Annotated[
        Path | None,
        typer.Option("--tenants-file", help="YAML file with the tenants that share the servers, their weights and quotas."),
    ] = None,
    tenant_keys_dir: Annotated[
        Path | None,
        typer.Option(
            "--tenant-keys-dir", help="Folder with a file of keys, one a line, for each tenant; default: keys, beside it."
        ),
    ] = None,
    routers: Annotated[
        int | None, typer.Option("--routers", min=1, help="Routers that serve, of which each gives its part of the quotas.")
    ] = None,
    saturation_steps: Annotated[
        float | None,
        typer.Option(
            "--saturation-steps",
            min=0,
            help="With tenants: steps of prompts that servers may have waiting [default: 0.5].",
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", help="Largest request body.", parser=parse_bytes, metavar="SIZE")
    ] = "32MiB",  # type: ignore[assignment]  # typer parses defaults as it parses arguments
    read_seconds: Annotated[
        float, typer.Option("--read-seconds", help="For a request's header, and its body: plus a second a KiB.")
    ] = 20.0,
    connection_seconds: Annotated[
        float, typer.Option("--connection-seconds", help="An older connection is closed with its next answer; 0: never.")
    ] = 120.0,
    epp_port: Annotated[
        int | None,
        typer.Option(
            "--epp-port", min=0, max=65535, help="Also serve a gateway as its endpoint picker, over gRPC; 9002 by custom."
        ),
    ] = None,
    epp_health_port: Annotated[
        int, typer.Option("--epp-health-port", min=0, max=65535, help="With --epp-port: gRPC's health service.")
    ] = 9003,
    epp_secure_serving: Annotated[
        bool,
        typer.Option(
            "--epp-secure-serving/--no-epp-secure-serving",
            help="With --epp-port: serve TLS there, as gateways expect, with a certificate of its own.",
        ),
    ] = True,
    epp_fallbacks: Annotated[
        int,
        typer.Option(
            "--epp-fallbacks",
            min=0,
            max=8,
            help="With --epp-port: endpoints named behind the picked one, for gateways that read several.",
        ),
    ] = 0,
    accept_seconds: Annotated[
        float,
        typer.Option(
            "--accept-seconds",
            help="After SIGTERM requests are accepted for at least so long, and on while they come: to half of the drain.",
        ),
    ] = 5.0,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="After that open requests may take so long to finish.")
    ] = 120.0,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    access_log: Annotated[bool, typer.Option("--access-log/--no-access-log", help="A line for each answer.")] = True,
) -> None:
    """Route requests to servers of one model: by cached prefix, load and session."""
    import asyncio

    import uvloop
    from starling_agent.api_keys import ApiKeys
    from starling_agent.file_token import FileToken
    from starling_agent.logs import configure_logs
    from starling_agent.settings import ServerSettings
    from starling_engine.weights.hub import resolve_model
    from starling_router.canary_file import read_canary
    from starling_router.epp import EppSettings
    from starling_router.exact import ExactPrompts
    from starling_router.hold_queue import HoldPolicy
    from starling_router.picker import RouterPolicy
    from starling_router.router import ServiceRouter
    from starling_router.run import run_router
    from starling_router.shadows import ShadowPolicy

    from starling_cli.commands.router_parts import announcing, sources_of, tenancy_of

    try:
        keys = ApiKeys(api_key or (), api_key_file)
        tenancy, steps = tenancy_of(
            tenants_file,
            keys,
            router_token_file,
            tenant_keys_dir=tenant_keys_dir,
            routers=routers,
            saturation_steps=saturation_steps,
        )
        settings = ServerSettings(
            host=host,
            port=port,
            api_keys=keys,
            router_token=None if router_token_file is None else FileToken.required(router_token_file, "router_token_file"),
            allowed_origins=tuple(allowed_origins or ()),
            allowed_hosts=tuple(allowed_hosts or ()),
            max_body_bytes=max_body_bytes,
            read_seconds=read_seconds,
            connection_seconds=connection_seconds,
            accept_seconds=accept_seconds,
            drain_seconds=drain_seconds,
            log_level=log_level,
            access_log=access_log,
        )
        sources, words = sources_of(backends or (), backends_file, backends_service, backends_port, has_epp=epp_port is not None)
        configure_logs(log_level)
        exact = ExactPrompts.load(resolve_model(model, None), settings) if model is not None else None
        policy = RouterPolicy(prefix=prefix_weight, load=load_weight, session=session_weight)
        hold = HoldPolicy(hold_requests, hold_bytes, hold_seconds, steps)
        epp = None if epp_port is None else EppSettings(epp_port, epp_health_port, epp_secure_serving, epp_fallbacks)
        shadows = ShadowPolicy(shadow_share)
        canary = None if canary_file is None else read_canary(canary_file)
        make = partial(ServiceRouter, settings, policy, lambda: keys.first, exact, hold, tenancy, shadows, canary)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(run_router(settings, make, sources, announcing(words, host), epp))
    except StarlingError as error:
        fail(str(error), fix_for(error, "router"))
    raise typer.Exit(code)
