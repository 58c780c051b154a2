"""`starling bench`: how fast is it?"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from starling_engine.byte_sizes import parse_bytes

from starling_cli.commands.failures import fail, fix_for

if TYPE_CHECKING:
    from starling_engine import LLM

app = typer.Typer(help="Measure the engine, or any server with OpenAI's API.", no_args_is_help=True, rich_markup_mode=None)

START_SERVER = "start a server with `starling serve MODEL`, or give its --url"
NAME_MODEL = "name the model that it serves: --model NAME"
Model = Annotated[str, typer.Argument(help="Folder of a checkpoint, or a Hugging Face id.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file too.")]
InputLen = Annotated[int, typer.Option("--input-len", min=1, help="Words of each prompt, about as many tokens.")]
OutputLen = Annotated[int, typer.Option("--output-len", min=1, help="Tokens of each answer.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the synthetic prompts and arrivals.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
MaxSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Requests that run at once.")]
KVDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto, fp8, int8 or int4.")]
KVBytes = Annotated[Any, typer.Option("--kv-cache-memory-bytes", parser=parse_bytes, metavar="SIZE", help="4GiB")]
Speculative = Annotated[
    str | None, typer.Option("--speculative-config", metavar="JSON", help='{"method": "ngram"}, as `starling serve` takes it.')
]


@app.command()
def latency(
    model: Model,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Requests in a run.")] = 8,
    iterations: Annotated[int, typer.Option("--num-iters", min=1, help="Runs that count.")] = 10,
    warmup: Annotated[int, typer.Option("--num-iters-warmup", min=0, help="Runs before them.")] = 2,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    max_num_seqs: MaxSeqs = 256,
    kv_cache_dtype: KVDtype = "auto",
    kv_cache_memory_bytes: KVBytes = None,
    speculative_config: Speculative = None,
    json_file: JsonFile = None,
) -> None:
    """Time one batch from start to end, without a server."""
    arguments = locals()
    from starling_cli.benchmark import offline, report, workload

    texts = workload.prompts(batch_size * (warmup + iterations), input_len, seed)
    batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
    llm = _llm(model, dtype, max_num_seqs, kv_cache_dtype, kv_cache_memory_bytes, speculative_config)
    result = offline.measure_latency(llm, batches, output_len, warmup)
    report.print_latency(f"latency of {model}", result)
    if json_file is not None:
        report.write_json(json_file, "latency", arguments, result)


@app.command()
def throughput(
    model: Model,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests, all at once.")] = 100,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    max_num_seqs: MaxSeqs = 256,
    kv_cache_dtype: KVDtype = "auto",
    kv_cache_memory_bytes: KVBytes = None,
    speculative_config: Speculative = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens a second with everything to do at once, without a server."""
    arguments = locals()
    from starling_cli.benchmark import offline, records, report, workload

    llm = _llm(model, dtype, max_num_seqs, kv_cache_dtype, kv_cache_memory_bytes, speculative_config)
    offline.measure_throughput(llm, workload.prompts(4, input_len, seed + 1), 8)
    measured, seconds, drafts = offline.measure_throughput(llm, workload.prompts(num_prompts, input_len, seed), output_len)
    summary = records.summarize(measured, seconds, drafts=drafts)
    report.print_summary(f"throughput of {model}", summary)
    if json_file is not None:
        report.write_json(json_file, "throughput", arguments, summary)


@app.command()
def serve(
    more_goals: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    url: Annotated[str, typer.Option("--url", "--base-url", help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="By default the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Also $STARLING_API_KEY.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--completions", help="Which route.")] = False,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests in all.")] = 100,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    request_rate: Annotated[float, typer.Option("--request-rate", help="Requests a second; inf for all at once.")] = float("inf"),
    max_concurrency: Annotated[int | None, typer.Option("--max-concurrency", min=1, help="Open requests at most.")] = None,
    temperature: Annotated[float, typer.Option("--temperature")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Always answer to the full length (vLLM's field).")
    ] = True,
    goodput: Annotated[list[str] | None, typer.Option("--goodput", help="Goals in ms: ttft:500 tpot:50")] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Drive a server at a rate or a concurrency; report TTFT, ITL, TPOT, throughput, goodput and accepted drafts."""
    arguments = locals()
    import asyncio

    from starling_cli.benchmark import client, records, report, workload

    try:
        # vLLM writes several goals after one flag; those after the first arrive as arguments.
        goals = records.parse_goals([*(goodput or ()), *(more_goals or ())])
    except ValueError as error:
        fail(str(error), "write --goodput ttft:500 tpot:50")
    if request_rate <= 0:
        fail(f"--request-rate must be positive, got {request_rate}", "leave it out to send all requests at once")
    key = api_key or os.environ.get("STARLING_API_KEY")
    load = client.BenchmarkLoad(
        url=url,
        model=model or _first_model(url, key),
        api_key=key,
        chat=chat,
        prompts=workload.prompts(num_prompts, input_len, seed),
        output_tokens=output_len,
        temperature=temperature,
        ignore_eos=ignore_eos,
        rate=request_rate,
        concurrency=max_concurrency,
        seed=seed,
    )
    measured, seconds, drafts = asyncio.run(client.run_load(load))
    summary = records.summarize(measured, seconds, goals, drafts)
    report.print_summary(f"{url}, {num_prompts} requests", summary)
    if json_file is not None:
        report.write_json(json_file, "serve", arguments, summary)
    if not summary.completed:
        fail("no request was answered", START_SERVER)


def _first_model(url: str, api_key: str | None) -> str:
    """Returns the first name in the server's list of models."""
    import httpx
    from starling_agent.client.bounded import BadAnswer

    from starling_cli.chatting.client import AnswerError, ChatClient
    from starling_cli.chatting.terminal import harmless

    try:
        with ChatClient(url, api_key) as client:
            names = client.models()
    except (AnswerError, BadAnswer) as error:
        fail(harmless(str(error)), NAME_MODEL)
    except httpx.HTTPError as error:
        fail(f"{url} cannot be reached: {error}", START_SERVER)
    if not names:
        fail(f"{url} has no list of models", NAME_MODEL)
    return names[0]


def _llm(
    model: str,
    dtype: str,
    max_num_seqs: int,
    kv_cache_dtype: str,
    kv_cache_memory_bytes: int | None,
    speculative_config: str | None,
) -> "LLM":
    from starling_engine import LLM
    from starling_engine.errors import StarlingError

    try:
        return LLM(
            model=model,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            speculative_config=speculative_config,
        )
    except StarlingError as error:
        fail(str(error), fix_for(error))
