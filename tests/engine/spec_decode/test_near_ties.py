"""In bfloat16 a step that verifies drafts adds up in another order: where a token differs first, two were as good as each other."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.outputs import CompletionOutput
from starling_engine.rng import gumbel

from tests.engine.checkpoints import VARIANTS, VOCAB, write_checkpoint
from tests.engine.real_engine import running

pytestmark = pytest.mark.timeout(120)
PROMPTS = 24
BOUND = 0.1
"""Most by which the two tokens' noised logits may differ. Logits here are sums of bfloat16, some 8 in size, with steps of 1/32."""


async def answers(engine: AsyncEngine, temperature: float, predicted: list[CompletionOutput] | None) -> list[CompletionOutput]:
    rng, asked = random.Random(0), []
    for number in range(PROMPTS):
        prompt = rng.choices(range(VOCAB), k=30)
        params = SamplingParams(temperature=temperature, max_tokens=80, ignore_eos=True, seed=number, logprobs=20)
        prediction = list(predicted[number].token_ids) if predicted else None
        asked.append(engine.complete(prompt, params, prediction=prediction))
    return [output.outputs[0] for output in await asyncio.gather(*asked)]


def gap(plain: CompletionOutput, at: int, other: int, seed: int, temperature: float) -> float:
    """Returns by how much the token that was drawn beats another one, with the noise that both had."""
    assert plain.logprobs is not None
    found: dict[int, Any] = plain.logprobs[at]
    drawn = plain.token_ids[at]
    noise = gumbel(torch.tensor([seed]), torch.tensor([30 + at]), VOCAB)[0] if temperature else torch.zeros(VOCAB)
    scores = [found[token].logprob / (temperature or 1.0) + float(noise[token]) for token in (drawn, other)]
    return scores[0] - scores[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_first_token_that_differs_is_a_near_tie(temperature: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3-mixed"])
    settings: dict[str, Any] = {"model": str(tmp_path), "dtype": "bfloat16", "max_model_len": 128}
    async with running(**settings) as engine:
        plain = await answers(engine, temperature, None)
        drafted = await answers(engine, temperature, plain)
        assert engine.stats.spec_accepted_tokens_total > 0
    differing = 0
    for seed, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        at = next((at for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), None)
        if at is not None:
            differing += 1
            assert abs(gap(one, at, other.token_ids[at], seed, temperature)) < BOUND, (seed, at)
    assert differing < PROMPTS / 2, "most are equal"
