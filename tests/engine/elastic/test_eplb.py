"""Experts that move between ranks because of their load, while the group serves: less waiting, and the same tokens."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine import AsyncEngine, SamplingParams, native
from starling_engine.delta import Stats
from starling_engine.topology.placement import Placement
from starling_engine.weights.checkpoint import stored_formats
from starling_engine.weights.quantized.writer import SCHEMES, quantize_checkpoint
from transformers import PreTrainedModel

from tests.engine.checkpoints import VARIANTS, VOCAB, Reference, Variant, answer, write_checkpoint
from tests.engine.elastic.groups import Traffic, group
from tests.engine.real_engine import running
from tests.engine.written import write_tokenizer

HOT = 1.0
"""Bias that the router adds to the affinities, at most 1, of the experts that all tokens are to take."""
NEAR = 0.3
"""Nats between two tokens of which either may be taken: sums in bfloat16 are rounded in other places."""
EPLB: dict[str, Any] = {"enable_eplb": True, "eplb_window_size": 48, "eplb_step_interval": 60}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Every token takes experts 0 and 1 of every layer, which at first lie on one rank, and a third."""
    folder = tmp_path_factory.mktemp("skewed")
    return answer(folder, write_skewed(folder, VARIANTS["deepseek-v3"]))


def write_skewed(folder: Path, variant: Variant, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = write_checkpoint(folder, variant, dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([HOT, HOT, 0, 0, 0, 0, 0, 0]))
    model.save_pretrained(folder)
    return model


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


@pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")
@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
@pytest.mark.whole
async def test_codes_move_too(scheme: str, tmp_path: Path) -> None:
    """Two ranks whose experts move answer as one rank does; where they first differ, its two best tokens are a near tie."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    variant = replace(VARIANTS["deepseek-v3"], changes={**VARIANTS["deepseek-v3"].changes, **sizes})
    write_skewed(tmp_path / "plain", variant, torch.bfloat16)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "codes", SCHEMES[scheme])
    write_tokenizer(tmp_path / "codes")
    assert {each.group for name, each in stored_formats(tmp_path / "codes").items() if ".experts." in name} == {128}
    prompts = [[(at * (step + 3) + step) % VOCAB for at in range(24)] for step in range(6)]
    args: dict[str, Any] = {"model": str(tmp_path / "codes"), "dtype": "bfloat16", "max_num_batched_tokens": 24}
    async with running(**args) as one:
        expected = [await answered(one, prompt, 0) for prompt in prompts]
    async with running(**args, data_parallel_size=2, enable_expert_parallel=True, **EPLB, progress_timeout=10.0) as several:
        turn = 0
        while several.stats.eplb_rearrangements_total < 1 or turn < 4:
            turn += 1
            found = await asyncio.gather(*(answered(several, prompt, turn) for prompt in prompts))
            for (tokens, _), (known, leads) in zip(found, expected, strict=True):
                first = next((at for at, (a, b) in enumerate(zip(tokens, known, strict=True)) if a != b), None)
                assert first is None or leads[first] < NEAR, (first, leads)
        assert several.stats.eplb_experts_moved_total >= 2


async def answered(engine: AsyncEngine, prompt: list[int], turn: int) -> tuple[list[int], list[float]]:
    """Returns the greedy tokens, and by how many nats each leads the next best. Turns find nothing in one another's cache."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    (output,) = (await engine.complete(prompt, params, cache_salt=f"{turn}")).outputs
    best = [sorted((each.logprob for each in row.values()), reverse=True)[:2] for row in output.logprobs or []]
    return output.token_ids, [first - second for first, second in best]


def apart(placement: Placement, *experts: int) -> bool:
    return not any({*experts} <= {*held} for layer in placement.layers for held in layer)
