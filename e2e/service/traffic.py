"""A client inside the cluster: streams completions one after another and says how each of them ended.

usage: traffic.py BASE_URL MODEL STREAMS TOKENS     runs until SIGTERM; one line of JSON a request; $OPENAI_API_KEY is the key

It uses the `openai` client as users do, with its own retries off: a request that fails is a request that failed.
"""

import asyncio
import json
import signal
import sys
import time
from urllib.parse import urlsplit

import httpx
from openai import AsyncOpenAI, OpenAIError

PAUSE = 0.25
"""Seconds, in which a machine of two processors does something else."""
PATIENCE = 300
"""Seconds without a word of an answer: what waits its turn on a busy machine has not failed."""
PROMPTS = 500
"""After so many numbers the same prompts come again."""


async def one_request(client: AsyncOpenAI, model: str, number: int, most: int) -> dict[str, object]:
    """Streams one completion to its end; an unfinished stream counts as failed."""
    began = time.time()
    prompt, text, tokens, finished, error = f"Number {number}: the", "", 0, None, None
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=most,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.text
                tokens += bool(choice.text)
                finished = choice.finish_reason or finished
    # The client lets errors of a stream that has begun through as they are.
    except (OpenAIError, httpx.HTTPError) as failure:
        error = f"{type(failure).__name__}: {failure}" + (f" ({failure.__cause__!r})" if failure.__cause__ else "")
    if error is None and finished is None:
        error = "the stream ended without a finish_reason"
    return {"at": began, "seconds": time.time() - began, "tokens": tokens, "error": error, "prompt": prompt, "text": text}


async def keep_busy(client: AsyncOpenAI, model: str, stop: asyncio.Event, worker: int, most: int) -> None:
    number = worker
    while not stop.is_set():
        print(json.dumps(await one_request(client, model, number, most)), flush=True)
        number = (number + 100) % PROMPTS
        await asyncio.sleep(PAUSE)


async def wait_reachable(url: str) -> None:
    """Waits for a first connection: a node's proxy refuses them until it has heard of a pod that is ready."""
    host, port = urlsplit(url).hostname, urlsplit(url).port or 80
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return


async def main() -> None:
    url, model, streams, tokens = sys.argv[1:]
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await wait_reachable(url)
    async with AsyncOpenAI(base_url=url, max_retries=0, timeout=PATIENCE) as client:
        await asyncio.gather(*(keep_busy(client, model, stop, worker, int(tokens)) for worker in range(int(streams))))


if __name__ == "__main__":
    asyncio.run(main())
