"""A request's output does not depend on what else runs, how it is cut up, or what is cached: greedy, fp32."""

import asyncio
import random

import pytest
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.outputs import RequestOutput

from tests.engine.real_engine import KV_BYTES, idle, running

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
TIE = 1e-4
"""Difference of the two likeliest tokens below which either may come first."""


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    shared = rng.choices(range(300, 3000), k=70)
    shapes = ((70, 5), (70, 90), (33, 1), (0, 8), (64, 0))
    return [shared[:length] + rng.choices(range(300, 3000), k=extra) for length, extra in shapes]


async def together(engine: AsyncEngine) -> list[RequestOutput]:
    return await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts()))


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    """The reference: each prompt by itself, whole, nothing cached."""

    async def run() -> list[RequestOutput]:
        async with running(enable_prefix_caching=False, async_scheduling=False) as engine:
            return [await engine.complete(prompt, GREEDY) for prompt in prompts()]

    return asyncio.run(run())


def assert_equal(outputs: list[RequestOutput], reference: list[RequestOutput]) -> None:
    for output, wanted in zip(outputs, reference, strict=True):
        ours, theirs = output.outputs[0], wanted.outputs[0]
        assert len(ours.token_ids) == 24
        first = next((i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if a != b), None)
        if first is not None:
            assert theirs.logprobs is not None
            best, second = sorted((entry.logprob for entry in theirs.logprobs[first].values()), reverse=True)[:2]
            assert best - second < TIE, (first, ours.token_ids, theirs.token_ids)


CASES = {
    "batched": {"enable_prefix_caching": False},
    "asynchronous": {"async_scheduling": True},
    "chunked": {"max_num_batched_tokens": 17, "enable_prefix_caching": False},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "torch attention": {"attention_backend": "torch"},
    "priority": {"scheduling_policy": "priority"},
}


@pytest.mark.parametrize("case", CASES)
async def test_together(case: str, alone: list[RequestOutput]) -> None:
    async with running(**CASES[case]) as engine:
        assert_equal(await together(engine), alone)
        assert await idle(engine)


async def test_prefix_hits(alone: list[RequestOutput]) -> None:
    async with running() as engine:
        await together(engine)
        outputs = await together(engine)
        assert [o.num_cached_tokens for o in outputs] == [64, 144, 32, 0, 48]
        assert_equal(outputs, alone)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_preempted(asynchronous: bool, alone: list[RequestOutput]) -> None:
    """A cache that holds the longest request, but not all of them at once."""
    async with running(async_scheduling=asynchronous, max_model_len=192) as engine:
        block_bytes = KV_BYTES // engine.stats.kv_blocks
    small = 14 * block_bytes + block_bytes // 2
    async with running(async_scheduling=asynchronous, max_model_len=192, kv_cache_memory_bytes=small, max_num_seqs=5) as engine:
        outputs = await asyncio.gather(*(together(engine) for _ in range(3)))
        assert engine.stats.preemptions_total > 0
        for output in outputs:
            assert_equal(output, alone)
        assert await idle(engine)


async def test_seeded_samples_do_not_depend_on_the_batch() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=24, ignore_eos=True, seed=5, n=2)
    async with running(enable_prefix_caching=False) as engine:
        single = await engine.complete(prompts()[1], params)
        noise = [engine.complete(prompt, SamplingParams(temperature=1.0, max_tokens=30)) for prompt in prompts()]
        crowd = await asyncio.gather(engine.complete(prompts()[1], params), *noise)
        assert [o.token_ids for o in crowd[0].outputs] == [o.token_ids for o in single.outputs]
        assert single.outputs[0].token_ids != single.outputs[1].token_ids
