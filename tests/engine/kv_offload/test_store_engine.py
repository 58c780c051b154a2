"""Engines share a store: one finds what another has computed, and answers do not change when the store goes away."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.ipc import child
from starling_engine.kv_offload.secondary.store.tier import open_store

from tests.engine.kv_offload import patient_core, store_master
from tests.engine.kv_offload.store_master import Master
from tests.engine.real_engine import running
from tests.fork_server import Fork
from tests.fork_server import start as start_fork

pytestmark = pytest.mark.skipif(store_master.missing() is not None, reason=str(store_master.missing()))

CORE = patient_core.__name__
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [3 + number * 7 % 500 for number in range(300)]
CHUNKS = 4
"""Whole chunks before the prompt's last token."""
CHUNK_BYTES = 64 * 5120
"""Keys and values of 5 layers with 2 heads of 64, in float32."""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    """A store whose values outlive engines."""
    master = Master(tmp_path)
    memory = open_store(f"{master.url}&segment=128MiB", b"")
    assert memory.wait(60)
    yield master
    memory.close()
    master.kill()


def another(number: int) -> list[int]:
    """Returns a prompt that shares no chunk with PROMPT, nor with another number's."""
    return [600 + number, *PROMPT[1:]]


def stored(engine: AsyncEngine) -> int:
    tier = engine.stats.tiers.get("store")
    return 0 if tier is None else tier.stored_bytes_total


def start(module: str, *arguments: str, **settings: Any) -> Fork:
    """Starts a core that waits for every lookup; whatever else is started as it is."""
    return start_fork(CORE if module == "starling_engine.core" else module, *arguments, **settings)


async def until_joined(engine: AsyncEngine, first: int) -> None:
    """Completes new prompts, from `another(first)` on, until the store takes what is computed, and has all of it."""
    for number in range(first, first + 100):
        await engine.complete(another(number), GREEDY)
        await asyncio.sleep(0.3)
        if stored(engine):
            break
    before = 0
    while before != (now := stored(engine)):
        before = now
        await asyncio.sleep(1.5)
    assert before, f"nothing was written: {engine.stats}"


async def until_stored(engine: AsyncEngine, size: int) -> None:
    for _ in range(200):
        if stored(engine) >= size:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{stored(engine)} bytes of {size} were written")


async def test_what_one_engine_has_computed_another_finds(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "start", start)
    url = f"{master.url}&timeout=10"
    prompts = [another(number) for number in range(3)]
    async with running(kv_store=url) as engine:
        await until_joined(engine, 100)
        first = []
        for prompt in prompts:
            before = stored(engine)
            first.append(await engine.complete(prompt, GREEDY))
            await until_stored(engine, before + CHUNKS * CHUNK_BYTES)
    assert {each.num_cached_tokens for each in first} == {0}
    async with running(kv_store=url, block_size=32) as engine:
        await until_joined(engine, 200)
        for prompt, computed in zip(prompts, first, strict=True):
            found = await engine.complete(prompt, GREEDY)
            assert found.outputs[0].token_ids == computed.outputs[0].token_ids
            if found.num_cached_tokens:  # a lookup may have come to its limit of seconds
                break
        assert found.num_cached_tokens == CHUNKS * 64

        master.kill()
        began = time.monotonic()
        await engine.complete([token + 2 for token in PROMPT], GREEDY)
        assert time.monotonic() - began < 10
