"""A core that answers but makes no progress is as good as dead, and says so."""

import asyncio
from pathlib import Path

import pytest
from starling_engine.delta import Delta
from starling_engine.errors import EngineDead
from starling_engine.request import EngineRequest

from tests.engine.held_executor import StuckExecutor, core_process


async def test_work_without_progress_ends_every_request(tmp_path: Path) -> None:
    async with core_process(tmp_path, StuckExecutor(), patience=0.5) as (client, _):
        await asyncio.sleep(0.8)
        client.check()  # idle without progress is healthy
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        await client.add(EngineRequest(id="a", prompt_ids=[1, 2]), deltas.put_nowait)
        delta = await asyncio.wait_for(deltas.get(), timeout=60)
        assert "no progress" in (delta.error or "")
        with pytest.raises(EngineDead):
            client.check()
