"""Experts that move between ranks because of their load, while the group serves: less waiting, and the same tokens."""

import pytest
import torch
from starling_engine import AsyncEngine
from starling_engine.delta import Stats

from tests.engine.checkpoints import VARIANTS, Reference, answer, write_checkpoint
from tests.engine.cores import assert_greedy
from tests.engine.elastic.groups import complete_many, group

HOT = 1.0
"""What the router adds to the affinities, which are at most 1, of the experts that all tokens are to take."""
EPLB = {"enable_eplb": True, "eplb_window_size": 64, "eplb_step_interval": 150}


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


async def serve_until(engine: AsyncEngine, reference: Reference, rearrangements: int, rounds: int = 40) -> Stats:
    """Answers requests, each as transformers would, until experts have moved so often."""
    for _ in range(rounds):
        for tokens in await complete_many(engine, reference, 6):
            assert_greedy(tokens, reference)
        if engine.stats.eplb_rearrangements_total >= rearrangements:
            return engine.stats
    raise AssertionError(f"{engine.stats} after {rounds} rounds")


@pytest.mark.parametrize(
    ("data", "tensor", "pipeline", "redundant"), [(2, 1, 1, 0), (4, 1, 1, 4), (2, 2, 1, 4), (1, 2, 1, 0), (2, 1, 2, 0)]
)
async def test_imbalance_falls_and_tokens_stay(skewed: Reference, data: int, tensor: int, pipeline: int, redundant: int) -> None:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    async with group(skewed, **sizes, **EPLB, num_redundant_experts=redundant, max_num_seqs=8) as engine:
        stats = await serve_until(engine, skewed, 1)
        print(stats)
        assert stats.eplb_balance_before < 0.8 < 0.9 < stats.eplb_balance_after
        assert stats.eplb_experts_moved_total >= 2
        for _ in range(5):
            await complete_many(engine, skewed, 6)
        print(engine.stats)
        assert engine.stats.eplb_balance > 0.9, "and so it is"
