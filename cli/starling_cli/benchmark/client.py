"""Drives an OpenAI-compatible server with streaming requests and times each piece."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from starling_cli.benchmark.acceptance import Acceptance, DraftCounts, accepted_between, counts_in
from starling_cli.benchmark.records import Record
from starling_cli.benchmark.workload import arrivals
from starling_cli.chatting.client import error_message

METRICS_SECONDS = 10.0
"""Most that the server's counters are waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkLoad:
    """`rate` is requests a second, infinite for all at once; `concurrency` bounds those that are open."""

    url: str
    model: str
    api_key: str | None
    chat: bool
    prompts: Sequence[str]
    output_tokens: int
    temperature: float
    ignore_eos: bool
    rate: float
    concurrency: int | None
    seed: int


async def run_load(load: BenchmarkLoad) -> tuple[list[Record], float, Acceptance | None]:
    """Returns the records in order, the seconds that it all took, and what became of drafts.

    These are the server's counters: drafts of others' requests meanwhile count, too.
    """
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    base = load.url.removesuffix("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    gate = asyncio.Semaphore(load.concurrency or len(load.prompts))
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=None, limits=limits) as client:
        before = await _draft_counts(client)
        began = time.perf_counter()
        tasks = []
        for prompt, due in zip(load.prompts, arrivals(len(load.prompts), load.rate, load.seed), strict=True):
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(asyncio.create_task(_one(client, load, prompt, gate)))
        records = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
        return records, seconds, accepted_between(before, await _draft_counts(client))


async def _draft_counts(client: httpx.AsyncClient) -> DraftCounts:
    """Reads the server's `/metrics`. One without such counters, such as a router, is taken for one without drafts."""
    try:
        response = await client.get("/metrics", timeout=METRICS_SECONDS)
        return counts_in(response.text) if response.status_code == 200 else DraftCounts()
    except (httpx.HTTPError, ValueError):
        return DraftCounts()


async def _one(client: httpx.AsyncClient, load: BenchmarkLoad, prompt: str, gate: asyncio.Semaphore) -> Record:
    async with gate:
        record = Record(time.perf_counter())
        path = "/v1/chat/completions" if load.chat else "/v1/completions"
        try:
            async with client.stream("POST", path, json=_body(load, prompt)) as response:
                if response.status_code != 200:
                    message = error_message(await response.aread())
                    record.error = f"{response.status_code}: {message or 'no message'}"
                else:
                    await _read(response, record)
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}"
        return record


async def _read(response: httpx.Response, record: Record) -> None:
    """Times pieces as they arrive. Only the last one with the usage is parsed: parsing would be timed too."""
    last = 0.0
    buffered = b""
    async for data in response.aiter_raw():
        now = time.perf_counter()
        *events, buffered = (buffered + data).split(b"\n\n")
        for event in events:
            if b'"usage":{' in event and b'"choices":[]' in event:
                _read_usage(event, record)
            elif b'"error":' in event[:20]:
                record.error = error_message(event.removeprefix(b"data: ")) or "error in the stream"
            elif b"[DONE]" not in event and b'"finish_reason":null' in event and b'"role"' not in event:
                _time_piece(record, now, last)
                last = now
    record.latency = (last or time.perf_counter()) - record.began
    record.output_tokens = record.output_tokens or (len(record.gaps) + 1 if last else 0)


def _time_piece(record: Record, now: float, last: float) -> None:
    if last:
        record.gaps.append(now - last)
    else:
        record.ttft = now - record.began


def _read_usage(event: bytes, record: Record) -> None:
    usage = json.loads(event.removeprefix(b"data: "))["usage"]
    record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _body(load: BenchmarkLoad, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": load.model}
    body |= {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": load.temperature}
    body["max_tokens"] = load.output_tokens
    if load.ignore_eos:
        body["ignore_eos"] = True
    return body
