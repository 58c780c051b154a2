"""A step that verifies drafts adds up in another order: where a bfloat16 token differs first, two were as good as each other."""

import asyncio
import random

import pytest
import torch
from starling_engine import AsyncEngine, SamplingParams
from starling_engine.outputs import CompletionOutput
from starling_engine.rng import gumbel

from tests.engine.real_engine import running

pytestmark = pytest.mark.timeout(120)
PROMPTS, PROMPT = 24, 30
BOUND = 0.1
"""Most by which the two tokens' noised logits may differ. Logits are sums of bfloat16, some 8 in size, with steps of 1/32."""


async def answers(engine: AsyncEngine, temperature: float, predicted: list[CompletionOutput] | None) -> list[CompletionOutput]:
    rng, asked = random.Random(0), []
    for number in range(PROMPTS):
        prompt = rng.choices(range(300, 3000), k=PROMPT)
        params = SamplingParams(temperature=temperature, max_tokens=150, ignore_eos=True, seed=number, logprobs=0)
        prediction = list(predicted[number].token_ids) if predicted else None
        asked.append(engine.complete(prompt, params, prediction=prediction))
    return [output.outputs[0] for output in await asyncio.gather(*asked)]


def gap(outputs: tuple[CompletionOutput, CompletionOutput], at: int, seed: int, temperature: float, vocab: int) -> float:
    """Returns by how much the noised logits of the two outputs' tokens differ, each by its own run; both had the same noise."""
    noise = gumbel(torch.tensor([seed]), torch.tensor([PROMPT + at]), vocab)[0] if temperature else torch.zeros(vocab)
    scores = []
    for output in outputs:
        token = output.token_ids[at]
        scores.append((output.logprobs or [])[at][token].logprob / (temperature or 1.0) + float(noise[token]))
    return abs(scores[0] - scores[1])


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.whole), 0.8])
async def test_the_first_token_that_differs_is_a_near_tie(temperature: float) -> None:
    async with running(dtype="bfloat16", max_num_seqs=PROMPTS) as engine:
        vocab = engine.model_config.vocab_size
        plain = await answers(engine, temperature, None)
        drafted = await answers(engine, temperature, plain)
        assert engine.stats.spec_accepted_tokens_total > 0
    differing = 0
    for seed, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        at = next((at for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), None)
        if at is not None:
            differing += 1
            assert gap((one, other), at, seed, temperature, vocab) < BOUND, (seed, at)
    assert differing < PROMPTS / 2, "most are equal; where kernels add up alike for any number of rows, all are"
