"""Engines that share a store: what one has computed another one finds, and a store that goes away costs answers nothing."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.tiers.store import open_store

from tests.engine.running import running
from tests.engine.tiers import store_master
from tests.engine.tiers.store_master import Master

pytestmark = pytest.mark.skipif(store_master.missing() is not None, reason=str(store_master.missing()))

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [3 + number * 7 % 500 for number in range(300)]
CHUNKS = 4
"""Whole chunks before the prompt's last token."""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    """A store that keeps what it is given when engines end."""
    master = Master(tmp_path)
    holder = open_store(f"{master.url}&segment=128MiB", b"")
    assert holder.wait(20)
    yield master
    holder.close()
    master.kill()


async def until_written(engine: AsyncEngine) -> None:
    for _ in range(200):
        await asyncio.sleep(0.05)
        tier = engine.stats.tiers.get("store")
        if tier is not None and tier.stored_bytes_total and not engine.stats.running:
            await asyncio.sleep(0.5)
            return
    raise AssertionError(f"nothing was written: {engine.stats}")


async def test_what_one_engine_has_computed_another_finds(master: Master) -> None:
    async with running(kv_store=master.url) as engine:
        first = await engine.complete(PROMPT, GREEDY)
        await until_written(engine)
    async with running(kv_store=master.url, block_size=32) as engine:
        await asyncio.sleep(1.5)  # a client needs a second to join the store
        second = await engine.complete(PROMPT, GREEDY)
        assert second.num_cached_tokens == CHUNKS * 64
        assert first.num_cached_tokens == 0 and first.outputs[0].token_ids == second.outputs[0].token_ids

        master.kill()
        other = [token + 1 for token in PROMPT]
        began = time.monotonic()
        await engine.complete(other, GREEDY)
        assert time.monotonic() - began < 10
