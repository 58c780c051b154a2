"""What HTTP costs: the throughput of 32 concurrent streams against the same requests offline, in turns on one machine."""

import asyncio
import json
import random
import statistics
import time
from pathlib import Path

from processes import free_port, running, serve
from starling_engine import LLM, SamplingParams

STREAMS = 32
PROMPT = 128
NEW = 64
TRIES = 4


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(100, 3000), k=PROMPT) for _ in range(STREAMS)]


async def stream(port: int, prompt: list[int]) -> int:
    """One streamed completion over a plain socket; returns its events. The client must not be what is measured."""
    body = json.dumps(
        {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    answer = await reader.read(-1)
    writer.close()
    assert b"200 OK" in answer[:20] and b"[DONE]" in answer, answer[:500]
    return answer.count(b"data: ")


async def all_streams(port: int, seed: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(stream(port, prompt) for prompt in prompts(seed)))
    return STREAMS * NEW / (time.perf_counter() - began)


def over_http(model: Path, threads: int) -> list[float]:
    port = free_port()
    options = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "4GiB", "--no-enable-prefix-caching")
    with running(serve(model, port, threads, *options), port):
        asyncio.run(all_streams(port, 99))
        return [asyncio.run(all_streams(port, seed)) for seed in range(TRIES)]


def offline(model: Path, threads: int) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    rates = []
    with LLM(
        str(model), max_model_len=2048, kv_cache_memory_bytes=4 << 30, num_threads=threads, enable_prefix_caching=False
    ) as llm:
        for seed in (99, *range(TRIES)):
            began = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(seed)], params, use_tqdm=False)
            rates.append(STREAMS * NEW / (time.perf_counter() - began))
    return rates[1:]


def report(model: Path, threads: int) -> list[str]:
    rates: dict[str, list[float]] = {"offline": [], "http": []}
    for _ in range(2):
        rates["offline"] += offline(model, threads)
        rates["http"] += over_http(model, threads)
    alone, served = (statistics.median(rates[name]) for name in ("offline", "http"))
    return [
        f"### {STREAMS} concurrent streams over HTTP, {threads} threads",
        "",
        f"{PROMPT} in, {NEW} out: offline {alone:.1f}, over HTTP {served:.1f} output tokens/s: a cost of {1 - served / alone:.1%} "
        f"(medians of {2 * TRIES}, in turns).",
    ]
