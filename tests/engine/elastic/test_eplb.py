"""Experts that move between ranks because of their load, while the group serves: less waiting, and the same tokens."""

import asyncio
import re
from typing import Any

import pytest
import torch
from starling_engine import AsyncEngine
from starling_engine.delta import Stats
from starling_engine.topology.placement import Placement

from tests.engine.checkpoints import VARIANTS, Reference, answer, write_checkpoint
from tests.engine.elastic.groups import Traffic, group

HOT = 1.0
"""Bias that the router adds to the affinities, at most 1, of the experts that all tokens are to take."""
EPLB: dict[str, Any] = {"enable_eplb": True, "eplb_window_size": 48, "eplb_step_interval": 60}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Every token takes experts 0 and 1 of every layer, which at first lie on one rank, and a third."""
    folder = tmp_path_factory.mktemp("skewed")
    model = write_checkpoint(folder, VARIANTS["deepseek-v3"])
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([HOT, HOT, 0, 0, 0, 0, 0, 0]))
    model.save_pretrained(folder)
    return answer(folder, model)


async def first_move(engine: AsyncEngine, stages: int = 1) -> Stats:
    """The counters when the experts of all stages have moved for the first time."""
    async with asyncio.timeout(120):
        while engine.stats.eplb_rearrangements_total < stages:  # noqa: ASYNC110 - processes send no events
            await asyncio.sleep(0.005)
    return engine.stats


@pytest.mark.parametrize(
    ("data", "tensor", "pipeline", "redundant"),
    [
        pytest.param(2, 1, 1, 0, marks=pytest.mark.whole),
        (4, 1, 1, 4),
        (1, 2, 1, 0),
        pytest.param(2, 1, 2, 0, marks=pytest.mark.whole),
    ],
    ids=str,
)
async def test_imbalance_falls_and_tokens_stay(skewed: Reference, data: int, tensor: int, pipeline: int, redundant: int) -> None:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    async with group(skewed, **sizes, **EPLB, num_redundant_experts=redundant, max_num_seqs=8) as engine:
        traffic = Traffic(engine, skewed, streams=6)
        moved = await first_move(engine)
        assert moved.eplb_balance_before + 0.05 < moved.eplb_balance_after and moved.eplb_balance_after > 0.9
        assert moved.eplb_experts_moved_total >= 2 and moved.eplb_seconds_total > 0
        await first_move(engine, stages=pipeline)
        async with asyncio.timeout(120):  # it is of a window of steps, and few streams load experts by chance
            while engine.stats.eplb_balance <= moved.eplb_balance_before + 0.1:
                await traffic.more()
        await traffic.stop()


@pytest.mark.whole
async def test_the_group_changes_its_size_meanwhile(skewed: Reference, caplog: pytest.LogCaptureFixture) -> None:
    """Experts go on moving in every epoch, and a next one begins with where they are."""
    caplog.set_level("INFO", "starling.parallel")
    sizes = {"data_parallel_size": 2, "enable_elastic_ep": True, "max_num_seqs": 8}
    async with group(skewed, **sizes, **{**EPLB, "eplb_step_interval": 20}) as engine:
        traffic = Traffic(engine, skewed)
        await first_move(engine)
        assert engine.cores.coordinator is not None
        for size in (3, 4, 2, 1, 2):
            await traffic.more(2)
            moved = engine.stats.eplb_experts_moved_total
            await engine.scale(size)
            placement = engine.cores.coordinator.placement
            assert placement is not None and placement.ranks == size
            if size == 3:
                assert apart(placement, 0, 1), "as the load had it"
        async with asyncio.timeout(60):
            while engine.stats.eplb_experts_moved_total == moved:
                await traffic.more(1)
        await traffic.stop()
    assert re.search(r"experts come from \w+ \(checkpoint \d+ MB/s, peers [1-9]", caplog.text), "both were tried"


def apart(placement: Placement, *experts: int) -> bool:
    return not any({*experts} <= {*held} for layer in placement.layers for held in layer)
