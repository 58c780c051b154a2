"""Requests with every kind of parameters, and all that each of them gets."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starling_engine.constraint import Constraint
from starling_engine.core.engine_core import EngineCore
from starling_engine.params import PoolingParams, SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.spec_decode.drafter import Drafter
from starling_engine.token_packing import unpack_floats

from tests.engine.cores import core_for

POOLED = [
    PoolingParams(pooling="last", normalize=False, logit_token_ids=[500, 3]),
    PoolingParams(pooling="mean", normalize=True, dimensions=48),
    PoolingParams(pooling="last", normalize=True),
    PoolingParams(pooling="cls", normalize=False),
]
Constrain = Callable[[EngineRequest], Constraint | None]
KINDS: list[dict[str, Any]] = [
    {"logprobs": 3, "prompt_logprobs": 2},
    {"presence_penalty": 0.7, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5},
    {"frequency_penalty": -1.5, "temperature": 0.7, "logprobs": 0},
    {"logit_bias": {7: 4.5, 0: -2.0, 300: 4.0}, "banned_token_ids": [3, 9], "min_tokens": 20, "stop_token_ids": [7, 11]},
    {"allowed_token_ids": list(range(0, 512, 3)), "frequency_penalty": 0.6, "presence_penalty": -0.4, "temperature": 1.2},
    {},
]


def request(rng: random.Random, number: int) -> EngineRequest:
    prompt = rng.choices(range(512), k=rng.randint(1, 40))
    name, seed = f"r{number}", number
    if number % 7 == 3:
        pooling = POOLED[number // 7 % len(POOLED)]
        return EngineRequest(id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=1), pooling=pooling)
    changes = KINDS[number % len(KINDS)]
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": rng.randint(30, 64), "ignore_eos": True, **changes})
    return EngineRequest(id=name, prompt_ids=prompt, params=params, seed=seed)


def random_traffic(
    folder: Path,
    drafter: Drafter | None = None,
    kv_blocks: int = 14,
    constrain: Constrain = lambda _: None,
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    """Returns `answers` of 16 requests in a cache that is too small: some are preempted, prompts run beside decodes."""
    with core_for(folder, kv_blocks=kv_blocks, budget=32, **settings) as core:
        core.scheduler.drafter = drafter or core.scheduler.drafter
        found = answers(core, [request(random.Random(number), number) for number in range(16)], constrain)
        alike = core.scheduler.config.stages > 1 or not core.scheduler.kv.groups  # what is admitted with a state alone never grows
        assert core.scheduler.stats.preemptions_total > 0 or alike, "or this shows less than it says"
    return found


def answers(core: EngineCore, requests: list[EngineRequest], constrain: Constrain = lambda _: None) -> dict[str, dict[str, Any]]:
    """Runs the requests; returns all that each of them got, its floats apart. `constrain` gives a request its constraint."""
    lists = ("tokens", "logprob_ids", "numbers", "prompt_logprob_ids", "prompt_numbers")
    found: dict[str, dict[str, Any]] = {r.id: {name: [] for name in lists} | {"end": None} for r in requests}
    for one in requests:
        assert core.add(one) is None
        core.scheduler.requests[one.id].constraint = constrain(one)
    deadline = time.monotonic() + 120
    while core.has_work:
        assert time.monotonic() < deadline
        for delta in core.step():
            answer = found[delta.id]
            answer["tokens"] += delta.tokens
            for kind, rows in (("", delta.logprobs), ("prompt_", delta.prompt_logprobs)):
                answer[f"{kind}logprob_ids"] += [row.token_ids for row in rows or []]
                answer[f"{kind}numbers"] += [number for row in rows or [] for number in row.logprobs]
            answer["numbers"] += unpack_floats(delta.pooled or b"")
            answer["end"] = (delta.finish_reason, delta.error)
    core.scheduler.check_integrity()
    return found


def assert_same(got: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    assert got.keys() == expected.keys()
    for name, answer in got.items():
        wanted = dict(expected[name])
        for numbers in ("numbers", "prompt_numbers"):
            assert answer.pop(numbers) == pytest.approx(wanted.pop(numbers), abs=1e-4), name
        assert answer == wanted, name
