"""Random traffic over real models: whatever moves between tiers, whoever is preempted or aborted, and in whatever layout an engine
starts anew, outputs are those of one that computes each prompt anew.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from starling_engine.config import TiersConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.kv_offload.sizes import chunk_bytes
from starling_engine.model_config.config import load_model_config
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.topology.layout import ParallelLayout

from tests.engine.checkpoints import VARIANTS, VOCAB, write_checkpoint
from tests.engine.cores import TIE, core_for
from tests.engine.kv_offload.test_secondary_tiers import worker_of

MAX_MODEL_LEN = 320
SEEDS = {"llama3.1": 3, "qwen3-mixed": 3, "deepseek-v3": 2, "qwen3-moe": 2}
ROUNDS = 4
WINDOW = 100
"""Of more than a chunk."""
MODELS = {
    "llama3.1": VARIANTS["llama3.1"],
    "qwen3-mixed": replace(VARIANTS["qwen3-mixed"], changes={**VARIANTS["qwen3-mixed"].changes, "sliding_window": WINDOW}),
    "deepseek-v3": VARIANTS["deepseek-v3"],
    "qwen3-moe": VARIANTS["qwen3-moe"],
}
OTHERS: dict[str, dict[str, Any]] = {
    "llama3.1": {"layout": ParallelLayout(tensor=2)},
    "qwen3-mixed": {"layout": ParallelLayout(pipeline=2)},
    "deepseek-v3": {"layout": ParallelLayout(tensor=2)},
    "qwen3-moe": {"layout": ParallelLayout(tensor=2), "expert_parallel": True},
}
"""How a model is started anew, beside block sizes of its own."""


@dataclass(frozen=True)
class Asked:
    """A prompt, what is answered to it, and where another token is as good: its two likeliest are as likely."""

    prompt: list[int]
    tokens: list[int]
    ties: list[bool]

    def assert_begins(self, tokens: list[int]) -> None:
        first = next((at for at, token in enumerate(tokens) if token != self.tokens[at]), None)
        assert first is None or self.ties[first], (first, tokens, self.tokens)


class Reference:
    """Answers prompts side by side, each with nothing cached."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.groups = len(core.scheduler.kv.groups)
        """Of keys and values, each with chunks of its own."""

    def ask(self, prompts: list[list[int]], counts: list[int]) -> list[Asked]:
        asked = {str(number): Asked(prompt, [], []) for number, prompt in enumerate(prompts)}
        for (name, each), count in zip(asked.items(), counts, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2)
            assert self._core.add(EngineRequest(id=name, prompt_ids=each.prompt, params=params)) is None
        while self._core.has_work:
            for delta in self._core.step():
                asked[delta.id].tokens.extend(delta.tokens)
                asked[delta.id].ties.extend(row.logprobs[1] - row.logprobs[2] < TIE for row in delta.logprobs or [])
        assert [len(each.tokens) for each in asked.values()] == [len(each.ties) for each in asked.values()] == counts
        return [*asked.values()]


def rounds_of(rng: random.Random, reference: Reference) -> list[list[Asked]]:
    """Chats that begin alike, part, and come back with what was answered; now and then one that is asked twice at once."""
    shared = [rng.choices(range(VOCAB), k=rng.randint(70, 160)) for _ in range(3)]
    chats = [rng.choice(shared)[: rng.randint(40, 160)] for _ in range(7)]
    rounds = []
    for _ in range(ROUNDS):
        chosen, counts = rng.sample(range(len(chats)), 6), []
        for at in chosen:
            if len(chats[at]) > MAX_MODEL_LEN - 120:
                chats[at] = rng.choice(shared)[: rng.randint(40, 160)]
            chats[at] = chats[at] + rng.choices(range(VOCAB), k=rng.randint(1, 50))
            counts.append(rng.randint(2, 64))
        asked = reference.ask([chats[at] for at in chosen], counts)
        for at, each in zip(chosen, asked, strict=True):
            chats[at] = chats[at] + each.tokens
        rounds.append([*asked, *rng.sample(asked, rng.randint(0, 2))])
    return rounds


class Round:
    """Requests at about the same time, and what they are told."""

    def __init__(self, core: EngineCore, asked: list[Asked]) -> None:
        self._core = core
        self._asked = {str(number): each for number, each in enumerate(asked)}
        self._got: dict[str, list[int]] = {name: [] for name in self._asked}
        self._aborted: set[str] = set()

    def serve(self, rng: random.Random) -> None:
        """They come at different times, and one in ten is aborted."""
        for name, each in self._asked.items():
            params = SamplingParams(temperature=0.0, max_tokens=len(each.tokens), ignore_eos=True)
            request = EngineRequest(id=name, prompt_ids=each.prompt, params=params, priority=rng.randint(0, 2))
            assert self._core.add(request) is None
            for _ in range(rng.randint(0, 3)):
                self._step()
            if rng.random() < 0.1:
                self._aborted.add(name)
                self._core.abort(name)
        deadline = time.monotonic() + 120
        while self._core.has_work:
            assert time.monotonic() < deadline
            self._step()
        while self._core.has_pending_transfers:
            assert time.monotonic() < deadline
            self._core.step()
            time.sleep(0.001)

    def _step(self) -> None:
        for delta in self._core.step():
            assert delta.error is None
            self._got[delta.id] += delta.tokens

    def check(self) -> None:
        self._core.scheduler.check_integrity()
        assert self._core.scheduler.kv.pool.num_used == 0
        for name, each in self._asked.items():
            assert name in self._aborted or len(self._got[name]) == len(each.tokens)
            each.assert_begins(self._got[name])


class Forgetful(Round):
    """The device forgets at once what nobody uses."""

    def _step(self) -> None:
        super()._step()
        self._core.scheduler.reset_device_cache()


def serve(core: EngineCore, asked: list[Asked], rng: random.Random, kind: type[Round] = Round) -> None:
    served = kind(core, asked)
    served.serve(rng)
    served.check()


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Reference]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, MODELS[request.param])
    with core_for(folder, kv_blocks=300, max_model_len=MAX_MODEL_LEN, prefix_caching=False) as core:
        yield request.param, folder, Reference(core)


def settings_of(rng: random.Random) -> dict[str, Any]:
    """A device that holds little more than the longest request."""
    block_size = rng.choice([8, 16, 32])
    return {
        "block_size": block_size,
        "kv_blocks": rng.randint(MAX_MODEL_LEN + 32, MAX_MODEL_LEN + 160) // block_size,
        "budget": rng.choice([24, 64]),
        "max_model_len": MAX_MODEL_LEN,
        "policy": rng.choice(["fcfs", "priority"]),
    }


def tiers_of(rng: random.Random, chunks: int, bytes_each: int, folder: Path | None) -> TiersConfig:
    """A CPU tier of so many chunks; a folder that holds little or all."""
    cpu: dict[str, Any] = {"cpu_bytes": chunks * bytes_each, "cpu_policy": rng.choice(["lru", "arc"])}
    limit = rng.choice([20, 200]) * (bytes_each + 4096)
    return TiersConfig(**cpu) if folder is None else TiersConfig(**cpu, fs_path=str(folder), fs_bytes=limit)


def count(core: EngineCore, seen: Counter[str]) -> None:
    stats = core.scheduler.snapshot()
    seen["preempted"] += stats.preemptions_total
    for name, tier in stats.tiers.items():
        seen[f"{name} hits"] += tier.hits_total
        seen[f"{name} evictions"] += tier.evictions_total


def test_outputs_are_those_without_tiers(model: tuple[str, Path, Reference], tmp_path: Path) -> None:
    name, folder, reference = model
    whole = reference.groups * chunk_bytes(load_model_config(folder), worker_of(ParallelLayout(), 0))
    seen, again = Counter[str](), Counter[str]()
    for seed in range(SEEDS[name]):
        rng = random.Random(f"{name} {seed}")
        rounds = rounds_of(rng, reference)
        outside = tmp_path / str(seed) if seed % 2 else None
        tiers = tiers_of(rng, rng.randint(5, 7) if seed < 2 else 40, whole, outside)
        preempt = ("swap", "recompute", "auto")[seed % 3]
        with core_for(folder, tiers=tiers, preempt=preempt, **settings_of(rng)) as core:
            for asked in rounds:
                serve(core, asked, rng)
                if rng.random() < 0.3:
                    core.scheduler.reset_device_cache()
            count(core, seen)
        if outside is not None:
            other = OTHERS[name] if seed == 1 else {}
            with core_for(folder, tiers=tiers, **{**settings_of(rng), **other}) as core:
                serve(core, rounds[-1], rng)
                count(core, again)
    assert seen["preempted"] and seen["cpu hits"] and seen["cpu evictions"], seen
    assert again["filesystem hits"] and again["cpu hits"], again


@pytest.mark.parametrize("model", ["llama3.1", "deepseek-v3", "qwen3-moe"], indirect=True)
def test_preempted_requests_are_swapped_out_and_in(model: tuple[str, Path, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is stored here, so that what is in slots, and comes back from there, is of requests that were preempted.

    Not of a model with windows: when it is preempted, what it would read at a chunk's end has mostly left them.
    """
    _, folder, reference = model
    rng = random.Random(5)
    asked = reference.ask([rng.choices(range(VOCAB), k=150) for _ in range(6)], [80] * 6)
    device = {"kv_blocks": 44, "max_model_len": MAX_MODEL_LEN}
    with core_for(folder, tiers=TiersConfig(cpu_bytes=8 << 20), preempt="swap", **device) as core:
        offload = core.scheduler.offload
        assert offload is not None
        monkeypatch.setattr(offload.device, "_under_pressure", lambda: False)
        serve(core, asked, rng, Forgetful)
        stats = core.scheduler.snapshot()
    cpu = stats.tiers["cpu"]
    assert stats.preemptions_total and cpu.stored_bytes_total and cpu.loaded_bytes_total, stats
