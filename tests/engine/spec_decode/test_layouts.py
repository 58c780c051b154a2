"""Real engines with drafts from text answer as without, in float32, in each layout; and they do have drafts."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.frontend.resolve import resolve

from tests.engine.checkpoints import VARIANTS, VOCAB, write_checkpoint
from tests.engine.real_engine import engine_args, running
from tests.engine.written import write_tokenizer

pytestmark = pytest.mark.timeout(180)
PLAIN: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 20}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
    "experts": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "async": {"async_scheduling": True},
    "tiers": {"kv_cpu_bytes": 1 << 20, "kv_cache_memory_bytes": 1 << 19},
    "preemption": {"kv_cache_memory_bytes": 1 << 17, "max_model_len": 128},
}


def prompts() -> list[list[int]]:
    """Texts that repeat a passage, so that there is something to guess; and a random one."""
    rng = random.Random(0)
    passages = [rng.choices(range(VOCAB), k=12) for _ in range(5)]
    return [*(passage * 4 for passage in passages), rng.choices(range(VOCAB), k=40)]


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40},
    {"frequency_penalty": 0.3, "min_tokens": 30},
]


async def answers(engine: AsyncEngine, predicted: list[list[int]] | None = None) -> list[list[int]]:
    """Returns each prompt's answer: greedy, sampled, and with penalties."""
    asked = []
    for number, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=number, **KINDS[number % 3])
        asked.append(engine.complete(prompt, params, prediction=predicted[number] if predicted else None))
    return [list(output.outputs[0].token_ids) for output in await asyncio.gather(*asked)]


def mostly(tokens: list[int]) -> list[int]:
    """Returns the tokens, some replaced by others."""
    rng = random.Random(0)
    return [rng.randrange(VOCAB) if rng.random() < 0.15 else token for token in tokens]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    write_checkpoint(place, VARIANTS["qwen3-moe"])
    write_tokenizer(place)
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    async def ask() -> list[list[int]]:
        async with running(model=str(folder), **PLAIN) as engine:
            found = await answers(engine)
            assert not engine.stats.spec_drafts_total
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("args", "own"),
    [({}, True), ({"pipeline_parallel_size": 2}, False), ({"async_scheduling": False}, False), ({"spec_method": "suffix"}, False)],
)
def test_a_device_makes_drafts_where_that_keeps_steps_in_flight(args: dict[str, Any], own: bool, folder: Path) -> None:
    _, _, config = resolve(engine_args(model=str(folder), **{"spec_method": "ngram", **args}))
    assert config.worker.own_drafts == (config.scheduler.speculative if own else None)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.matrix
async def test_tokens_are_those_without_drafts(layout: str, method: str, folder: Path, expected: list[list[int]]) -> None:
    async with running(model=str(folder), **{**PLAIN, **LAYOUTS[layout]}, spec_method=method, spec_tokens=4) as engine:
        assert await answers(engine) == expected
        # Now with cached prompts, and for suffix with earlier outputs. How many drafts there are depends on what steps take.
        assert await answers(engine, [mostly(tokens) for tokens in expected]) == expected
        assert engine.stats.spec_accepted_tokens_total > 0
        assert engine.stats.preemptions_total or layout != "preemption"
