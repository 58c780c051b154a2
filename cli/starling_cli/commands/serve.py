"""`starling serve MODEL`: the engine and its endpoint in this terminal. Flags have vLLM's names where they mean the same."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from starling_engine.sizes import parse_bytes

from starling_cli.commands.failures import fail, fix_for
from starling_cli.commands.values import parse_rate

if TYPE_CHECKING:
    from starling_agent.settings import ServerSettings
    from starling_engine import EngineArgs

MODEL, ENDPOINT, ENGINE, MEMORY, TIERS, PARALLEL = "Model", "Endpoint", "Scheduling", "Memory", "KV tiers", "Parallelism"


def _option(*names: str, text: str, panel: str, **kwargs: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **kwargs)


def serve(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or a Hugging Face id, also with @REVISION.")],
    # model
    revision: Annotated[str | None, _option("--revision", text="Branch, tag or commit on the hub.", panel=MODEL)] = None,
    tokenizer: Annotated[str | None, _option("--tokenizer", text="Another folder or id for it.", panel=MODEL)] = None,
    load_format: Annotated[str, _option("--load-format", text="auto, or dummy for random weights.", panel=MODEL)] = "auto",
    device: Annotated[str, _option("--device", text="auto, cpu or cuda.", panel=MODEL)] = "auto",
    dtype: Annotated[str, _option("--dtype", text="auto, float32, bfloat16 or float16.", panel=MODEL)] = "auto",
    seed: Annotated[
        int | None, _option("--seed", text="Makes requests without a seed repeatable; also of dummy weights.", panel=MODEL)
    ] = None,
    enforce_eager: Annotated[
        bool, _option("--enforce-eager", text="On a GPU, no recorded steps (CUDA graphs).", panel=MODEL)
    ] = False,
    attention_backend: Annotated[str, _option("--attention-backend", text="The device's best unless named.", panel=MODEL)] = "auto",
    num_threads: Annotated[
        int | None, _option("--num-threads", text="CPU threads; by default what the cgroup allows.", panel=MODEL)
    ] = None,
    # endpoint
    host: Annotated[str, _option("--host", text="Address to listen on; 0.0.0.0 for all.", panel=ENDPOINT)] = "127.0.0.1",
    port: Annotated[int, _option("--port", text="Port to listen on; 0 takes a free one.", panel=ENDPOINT)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _option("--served-model-name", text="Name for requests' `model`; may be repeated.", panel=ENDPOINT),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option("--api-key", text="Key that requests must bring; may be repeated. Also $STARLING_API_KEY.", panel=ENDPOINT),
    ] = None,
    api_key_file: Annotated[Path | None, _option("--api-key-file", text="File with one key a line.", panel=ENDPOINT)] = None,
    allowed_origins: Annotated[
        list[str] | None, _option("--allowed-origins", text="Origin for CORS, or *; may be repeated.", panel=ENDPOINT)
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None, _option("--allowed-hosts", text="Name in requests' Host, or *.NAME; may be repeated.", panel=ENDPOINT)
    ] = None,
    prefix_cache_salt: Annotated[
        str, _option("--prefix-cache-salt", text="key: API keys share no cached prefix; or none.", panel=ENDPOINT)
    ] = "key",
    rate_limit: Annotated[
        Any, _option("--rate-limit", text="Of each key or address: 10/s, 600/m, 100/30s.", panel=ENDPOINT, parser=parse_rate)
    ] = None,
    max_body_bytes: Annotated[
        int, _option("--max-body-bytes", text="Largest request body.", panel=ENDPOINT, parser=parse_bytes, metavar="SIZE")
    ] = "32MiB",  # type: ignore[assignment]  # typer parses defaults as it parses arguments
    read_seconds: Annotated[
        float, _option("--read-seconds", text="For a request's header, and its body: plus a second a KiB.", panel=ENDPOINT)
    ] = 20.0,
    connection_seconds: Annotated[
        float, _option("--connection-seconds", text="An older connection is closed with its next answer; 0: never.", panel=ENDPOINT)
    ] = 120.0,
    trust_chat_template: Annotated[
        bool, _option("--trust-request-chat-template", text="Accept chat templates in requests.", panel=ENDPOINT)
    ] = False,
    accept_seconds: Annotated[
        float, _option("--accept-seconds", text="After SIGTERM requests are still accepted so long.", panel=ENDPOINT)
    ] = 5.0,
    drain_seconds: Annotated[
        float, _option("--drain-seconds", text="After that open requests may take so long to finish.", panel=ENDPOINT)
    ] = 120.0,
    log_level: Annotated[str, _option("--log-level", text="debug, info, warning or error.", panel=ENDPOINT)] = "info",
    log_requests: Annotated[bool, _option("--enable-log-requests", text="Log each request's parameters.", panel=ENDPOINT)] = False,
    log_prompts: Annotated[bool, _option("--enable-log-prompts", text="And its prompt.", panel=ENDPOINT)] = False,
    access_log: Annotated[bool, _option("--access-log/--no-access-log", text="A line for each answer.", panel=ENDPOINT)] = True,
    # scheduling
    max_model_len: Annotated[
        int | None, _option("--max-model-len", text="Longest prompt plus output; by default the model's.", panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[int, _option("--max-num-seqs", text="Requests that run at once.", panel=ENGINE)] = 256,
    max_num_batched_tokens: Annotated[
        int, _option("--max-num-batched-tokens", text="Token budget of a step.", panel=ENGINE)
    ] = 2048,
    step_target_ms: Annotated[
        int | None,
        _option("--step-target-ms", text="About how long prompts may stall streams: by default 200, on a GPU 40.", panel=ENGINE),
    ] = None,
    max_num_waiting: Annotated[
        int, _option("--max-num-waiting", text="Requests that may queue; further ones get 429.", panel=ENGINE)
    ] = 1024,
    max_num_waiting_tokens: Annotated[
        int, _option("--max-num-waiting-tokens", text="Tokens that may queue; further ones get 429.", panel=ENGINE)
    ] = 1 << 23,
    scheduling_policy: Annotated[str, _option("--scheduling-policy", text="fcfs or priority.", panel=ENGINE)] = "fcfs",
    async_scheduling: Annotated[
        bool | None,
        _option("--async-scheduling/--no-async-scheduling", text="Plan a step while one runs.", panel=ENGINE),
    ] = None,
    progress_timeout: Annotated[
        float, _option("--progress-timeout", text="Seconds without progress that count as hung.", panel=ENGINE)
    ] = 20.0,
    enable_sleep_mode: Annotated[
        bool, _option("--enable-sleep-mode", text="Clients may free its memory: POST /sleep, /wake_up.", panel=ENGINE)
    ] = False,
    # memory
    block_size: Annotated[int, _option("--block-size", text="Tokens in a block of the KV cache.", panel=MEMORY)] = 16,
    kv_cache_dtype: Annotated[
        str, _option("--kv-cache-dtype", text="auto, fp8 or fp8_e4m3: half of bfloat16's bytes.", panel=MEMORY)
    ] = "auto",
    kv_cache_memory_bytes: Annotated[
        Any,
        _option("--kv-cache-memory-bytes", text="The KV cache's size: 4GiB.", panel=MEMORY, parser=parse_bytes, metavar="SIZE"),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _option("--gpu-memory-utilization", text="Share of the device's memory, on CPU of the cgroup's.", panel=MEMORY),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        _option("--enable-prefix-caching/--no-enable-prefix-caching", text="Keep prompts' KV for later ones.", panel=MEMORY),
    ] = True,
    # KV tiers
    kv_cpu_bytes: Annotated[
        int,
        _option("--kv-cpu-bytes", text="Host memory of each rank: 4GiB.", panel=TIERS, parser=parse_bytes, metavar="SIZE"),
    ] = "0",  # type: ignore[assignment]
    kv_cpu_policy: Annotated[str, _option("--kv-cpu-policy", text="What leaves it first: lru or arc.", panel=TIERS)] = "lru",
    kv_fs_path: Annotated[
        str | None, _option("--kv-fs-path", text="Absolute folder, also for engines after this one.", panel=TIERS)
    ] = None,
    kv_fs_bytes: Annotated[
        Any,
        _option("--kv-fs-bytes", text="How large it may grow, in all: 10GiB.", panel=TIERS, parser=parse_bytes, metavar="SIZE"),
    ] = None,
    kv_fs_direct: Annotated[str, _option("--kv-fs-direct", text="Pass by the page cache: auto, on or off.", panel=TIERS)] = "auto",
    kv_store: Annotated[str | None, _option("--kv-store", text="Shared store: mooncake://MASTER:PORT.", panel=TIERS)] = None,
    preempt: Annotated[
        str, _option("--preempt", text="What preempted requests' KV becomes: auto, recompute or swap.", panel=TIERS)
    ] = "auto",
    kv_events: Annotated[
        str | None, _option("--kv-events", text="Publish what is cached and removed: tcp://*:5557.", panel=TIERS)
    ] = None,
    # parallelism
    tensor_parallel_size: Annotated[int, _option("--tensor-parallel-size", "-tp", text="TP.", panel=PARALLEL)] = 1,
    pipeline_parallel_size: Annotated[int, _option("--pipeline-parallel-size", "-pp", text="PP.", panel=PARALLEL)] = 1,
    enable_expert_parallel: Annotated[
        bool, _option("--enable-expert-parallel", "-ep", text="Whole experts on TP ranks.", panel=PARALLEL)
    ] = False,
    data_parallel_size: Annotated[int, _option("--data-parallel-size", "-dp", text="DP.", panel=PARALLEL)] = 1,
    enable_eplb: Annotated[bool, _option("--enable-eplb", text="Move experts between ranks by load.", panel=PARALLEL)] = False,
    num_redundant_experts: Annotated[
        int, _option("--num-redundant-experts", text="Copies of a layer's most loaded experts.", panel=PARALLEL)
    ] = 0,
    eplb_window_size: Annotated[
        int, _option("--eplb-window-size", text="Steps over which load is counted.", panel=PARALLEL)
    ] = 1000,
    eplb_step_interval: Annotated[
        int, _option("--eplb-step-interval", text="Steps from one look at the load to the next.", panel=PARALLEL)
    ] = 3000,
) -> None:
    """Serve MODEL over OpenAI's API."""
    flags = locals()
    from starling_engine.errors import StarlingError

    try:
        code = _run(_engine_args(flags), _server_settings(flags), log_level)
    except StarlingError as error:
        fail(str(error), fix_for(error))
    raise typer.Exit(code)


def _engine_args(flags: dict[str, Any]) -> "EngineArgs":
    """Flags that are the engine's have the engine's names."""
    import dataclasses

    from starling_engine import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    return EngineArgs(**{name: value for name, value in flags.items() if name in names})


def _server_settings(flags: dict[str, Any]) -> "ServerSettings":
    from starling_agent.api_keys import ApiKeys
    from starling_agent.settings import ServerSettings

    return ServerSettings(
        host=flags["host"],
        port=flags["port"],
        served_model_names=tuple(flags["served_model_name"] or ()),
        api_keys=ApiKeys(flags["api_key"] or (), flags["api_key_file"]),
        allowed_origins=tuple(flags["allowed_origins"] or ()),
        allowed_hosts=tuple(flags["allowed_hosts"] or ()),
        prefix_cache_salt=flags["prefix_cache_salt"],
        rate_limit=flags["rate_limit"],
        max_body_bytes=flags["max_body_bytes"],
        read_seconds=flags["read_seconds"],
        connection_seconds=flags["connection_seconds"],
        accept_seconds=flags["accept_seconds"],
        drain_seconds=flags["drain_seconds"],
        trust_chat_template=flags["trust_chat_template"],
        log_level=flags["log_level"],
        log_requests=flags["log_requests"],
        log_prompts=flags["log_prompts"],
        access_log=flags["access_log"],
    )


def _run(args: "EngineArgs", settings: "ServerSettings", log_level: str) -> int:
    import asyncio

    import uvloop
    from starling_agent.logs import configure_logs
    from starling_agent.serve import StoppedWhileLoading
    from starling_agent.serve import serve as serve_until_told

    from starling_cli.commands.progress import StartReport

    configure_logs(log_level)
    try:
        with StartReport(args.model) as report, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve_until_told(args, settings, report))
    except StoppedWhileLoading:
        typer.echo("stopped before the model was loaded", err=True)
        return 0
