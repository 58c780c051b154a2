"""A router that others wrote hears an engine, and foretells what it finds: NVIDIA Dynamo's index of KV events, as it is released.

https://docs.nvidia.com/dynamo/components/router/standalone-indexer
"""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from starling_engine import SamplingParams
from starling_engine.kv.event_endpoint import REPLAY_PORT_OFFSET
from starling_engine.kv_offload.secondary.base import CHUNK

from tests.engine.checkpoints import FAMILIES, write_servable
from tests.engine.listener import publisher_port
from tests.engine.real_engine import running
from tests.waiting import until

INSTALLED = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache" / "starling") / "ai-dynamo-runtime-1.6.1"
pytestmark = pytest.mark.skipif(not INSTALLED.exists(), reason="`make router` installs it, where there is one for the machine")
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
BLOCK = 16


class Dynamo:
    """Its index of one engine, over HTTP."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def register(self, port: int) -> None:
        place = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"tcp://127.0.0.1:{port + REPLAY_PORT_OFFSET}"}
        answer = await self._client.post("/register", json={"instance_id": 1, "model_name": "m", "block_size": BLOCK, **place})
        answer.raise_for_status()

    async def knows(self, tokens: list[int]) -> tuple[int, int]:
        """Returns how many of the first tokens it knows on the device, and with the CPU tier."""
        answer = await self._client.post("/query", json={"model_name": "m", "token_ids": tokens})
        found = answer.raise_for_status().json()["instances"].get("1", {"gpu": 0, "cpu": 0})
        return found["gpu"], found["cpu"]

    async def has(self, tokens: list[int]) -> bool:
        """Returns whether it knows all whole blocks of a prompt."""
        return max(await self.knows(tokens)) >= len(tokens) // BLOCK * BLOCK


@asynccontextmanager
async def dynamo() -> AsyncIterator[Dynamo]:
    port = publisher_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(INSTALLED)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)  # noqa: ASYNC220
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(600):
                try:
                    await client.get("/workers")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
            yield Dynamo(client)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("host", [0, 8 << 20], ids=["device", "device and CPU tier"])
async def test_it_foretells_what_an_engine_finds(host: int) -> None:
    """A device of 64 blocks, and 24 chunks of host memory or none; prompts that need more."""
    port, rng = publisher_port(), random.Random(7)
    shared = [rng.choices(range(300, 4000), k=300) for _ in range(5)]
    foretold = on_device = in_memory = 0
    memory = {"kv_cache_memory_bytes": 5 << 20, **({"kv_cpu_bytes": host} if host else {})}
    async with dynamo() as router, running(kv_events=f"tcp://*:{port}", **memory) as engine:
        await router.register(port)
        await asyncio.sleep(1)  # it subscribes; what it misses it asks for again at the next event
        for number in range(24):
            first = rng.choice(shared)[: rng.randrange(200, 300)]
            tokens = first + rng.choices(range(300, 4000), k=BLOCK - len(first) % BLOCK + 3)
            before: object = None
            while before != (known := await router.knows(tokens)):
                before = known
                await asyncio.sleep(0.2)
            device, longest = known
            cached = (await engine.complete(tokens, ONE)).num_cached_tokens
            # What the engine says of a prompt comes in order, and the prompt's own blocks last.
            await until(partial(router.has, tokens), f"the blocks of prompt {number}")
            said = max(device, longest // CHUNK * CHUNK)
            foretold += cached == said
            on_device += cached == device > 0
            in_memory += cached == said > device
            assert host or cached == device, f"prompt {number}"
    assert foretold > 20 and on_device > 4 and (in_memory > 2 or not host), (foretold, on_device, in_memory)


@pytest.mark.parametrize("family", ["lfm2", pytest.param("falcon-mamba", marks=pytest.mark.whole)])
async def test_snapshots_change_nothing_of_what_it_knows_of_blocks(family: str, tmp_path: Path) -> None:
    """They come and go while an output grows, with the hashes of blocks that stay. Of a state alone it knows nothing."""
    write_servable(tmp_path, FAMILIES[family])
    port, rng = publisher_port(), random.Random(3)
    prompts = [rng.choices(range(300, 4000), k=300) for _ in range(3)]
    async with dynamo() as router, running(model=str(tmp_path), kv_events=f"tcp://*:{port}") as engine:
        await router.register(port)
        await asyncio.sleep(1)
        for prompt in prompts:
            answer = await engine.complete(prompt, SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True))
            prompt += answer.outputs[0].token_ids[:-1]
        if family == "falcon-mamba":
            await asyncio.sleep(1)
            assert [await router.knows(prompt) for prompt in prompts] == [(0, 0)] * 3
            return
        for number, prompt in enumerate(prompts):
            await until(partial(router.has, prompt), f"the blocks of chat {number}")
        assert (await engine.complete([*prompts[0], 9, 8, 7], ONE)).num_cached_tokens == 448, "the last snapshot of 479 tokens"
