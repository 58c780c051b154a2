"""A group that changes its size while it serves: no request is lost, and none gives other tokens."""

import asyncio
import contextlib

import pytest
from starling_engine.errors import ConfigError

from tests.engine.checkpoints import Reference
from tests.engine.cores import assert_greedy
from tests.engine.elastic.groups import Traffic, complete, group


@pytest.mark.whole  # on a cluster, one does so each time
async def test_it_grows_and_shrinks_under_traffic(reference: Reference) -> None:
    async with group(reference, enable_elastic_ep=True, max_num_seqs=8) as engine:
        traffic = Traffic(engine, reference)
        await traffic.more()
        counted = 0
        for size in (2, 4, 3, 1):
            stages: list[str] = []
            seconds = await engine.scale(size, stages.append)
            assert stages == ["waiting", "preparing", "committing", "releasing"] == list(seconds)
            assert engine.cores.membership.layout.data == size
            assert len(engine.cores.processes) == size
            await traffic.more()
            assert engine.stats.generated_tokens_total >= counted, "counters go on"
            counted = engine.stats.generated_tokens_total
        await traffic.stop()
        assert engine.cores.membership.epoch == 5


async def test_sizes_that_cannot_be_change_nothing(reference: Reference) -> None:
    async with group(reference, enable_elastic_ep=True, data_parallel_size=2, min_data_parallel_size=2) as engine:
        for size in (1, 9):
            with pytest.raises(ConfigError, match=f"2 to 8 are possible, got {size}"):
                await engine.scale(size)
        assert_greedy(await complete(engine, reference), reference)
    async with group(reference, data_parallel_size=2) as engine:
        with pytest.raises(ConfigError, match="enable_elastic_ep"):
            await engine.scale(4)


async def test_what_is_cancelled_before_its_commit_is_undone(reference: Reference) -> None:
    async with group(reference, enable_elastic_ep=True, data_parallel_size=2) as engine:
        traffic = Traffic(engine, reference, streams=1)
        preparing = asyncio.Event()
        change = asyncio.create_task(engine.scale(3, lambda stage: preparing.set() if stage == "preparing" else None))
        await preparing.wait()
        change.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await change
        assert engine.cores.membership.layout.data == len(engine.cores.processes) == 2
        await traffic.more()
        await engine.scale(1)
        await traffic.more()
        await traffic.stop()
        assert engine.cores.membership.layout.data == 1
