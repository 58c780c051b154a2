"""Drafts change no token: what is sampled is what would be sampled without, whatever is guessed and in whatever layout."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starling_engine.config import SpeculativeConfig, TiersConfig
from starling_engine.request_state import RequestState
from starling_engine.spec_decode.drafter import Drafter
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import VARIANTS, write_checkpoint
from tests.engine.late_device import use_late_device
from tests.engine.mixed_requests import assert_same, random_traffic

pytestmark = pytest.mark.timeout(120)
MOST = 4


class Replay(Drafter):
    """Drafts what an earlier run answered, as far as `rng` does not put other tokens in its place."""

    active = True

    def __init__(self, answers: dict[str, dict[str, Any]], rng: random.Random) -> None:
        self._answers = answers
        self._rng = rng
        self.drafted = 0

    def propose(self, request: RequestState, most: int) -> list[int]:
        start = len(request.tokens) + request.pending - request.num_prompt
        right = self._answers[request.record.id]["tokens"][start : start + self._rng.randint(0, min(most, MOST))]
        wrong = self._rng.choice([0.0, 0.3, 1.0])
        self.drafted += len(right)
        return [self._rng.randrange(512) if self._rng.random() < wrong else token for token in right]


def on_host(_: Callable[..., None]) -> dict[str, Any]:
    return {}


def on_device(patch: Callable[..., None]) -> dict[str, Any]:
    use_late_device(patch)
    return {}


def on_recording_device(patch: Callable[..., None]) -> dict[str, Any]:
    use_late_device(patch, recorded=True)
    return {}


def in_stages(_: Callable[..., None]) -> dict[str, Any]:
    return {"layout": ParallelLayout(pipeline=2), "kv_blocks": 16}


def in_shards(_: Callable[..., None]) -> dict[str, Any]:
    return {"layout": ParallelLayout(tensor=2), "kv_blocks": 7}


def with_tiers(_: Callable[..., None]) -> dict[str, Any]:
    return {"tiers": TiersConfig(cpu_bytes=1 << 22), "preempt": "swap"}


@pytest.mark.parametrize("name", ["qwen3-mixed", "deepseek-v3"])
@pytest.mark.parametrize("where", [on_host, on_device, on_recording_device, in_stages, in_shards, with_tiers])
@pytest.mark.matrix
def test_every_kind_of_request_gets_the_tokens_that_it_gets_without(
    where: Callable[..., dict[str, Any]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, VARIANTS[name])
    kv_blocks = {"qwen3-mixed": 14, "deepseek-v3": 18}[name]
    expected = random_traffic(tmp_path, kv_blocks=kv_blocks)
    drafter = Replay(expected, random.Random(0))
    settings = {"kv_blocks": kv_blocks} | where(monkeypatch.setattr)
    if name == "deepseek-v3":
        settings["kv_blocks"] = kv_blocks  # every rank has whole latents
    found = random_traffic(tmp_path, drafter, speculative=SpeculativeConfig(num_speculative_tokens=MOST), **settings)
    assert drafter.drafted > 100
    assert_same(found, expected)
