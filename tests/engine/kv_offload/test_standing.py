"""An engine reports what a shared folder holds."""

from pathlib import Path
from typing import Any

import pytest
from starling_engine import SamplingParams
from starling_engine.kv_offload.secondary.base import CHUNK

from tests.engine.real_engine import running, wait_until


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_idle_engine_reports_what_another_has_written(tmp_path: Path, ranks: int) -> None:
    """One of the two evicts. The other has the numbers from the lease, without an order of its own."""
    tiers: dict[str, Any] = {"kv_cpu_bytes": 4 << 20, "kv_fs_path": str(tmp_path), "kv_fs_bytes": 1 << 30}
    async with running(**tiers) as busy, running(**tiers, tensor_parallel_size=ranks) as idle:
        await busy.complete(list(range(300, 600)), SamplingParams(temperature=0.0, max_tokens=1))
        for engine in (busy, idle):
            await wait_until(lambda engine=engine: engine.stats.tiers["filesystem"].objects == 300 // CHUNK)  # type: ignore[misc]
            assert engine.stats.tiers["filesystem"].bytes > 0
        assert idle.stats.tiers["filesystem"].stored_bytes_total == 0
