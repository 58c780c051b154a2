"""Drafts change no token, under masks or none: what is sampled is what would be sampled without, in whatever layout."""

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine.config import SpeculativeConfig, TiersConfig
from starling_engine.constraint import MaskRow
from starling_engine.executor import processes
from starling_engine.models.decoder import Decoder
from starling_engine.params import SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.request_state import RequestState
from starling_engine.spec_decode.drafter import Drafter
from starling_engine.spec_decode.verify_cost import VerifyCost
from starling_engine.step import OWN, StepPlan
from starling_engine.token_packing import pack_tokens, unpack_tokens
from starling_engine.topology.layout import ParallelLayout
from starling_engine.worker import masks
from starling_engine.worker.device.graphs import Graphs
from starling_engine.worker.device.step_buffer import StepShape
from starling_engine.worker.drafted_states import DraftedStates

from tests.engine.checkpoints import FAMILIES, VARIANTS, VOCAB, write_checkpoint
from tests.engine.cores import core_for
from tests.engine.late_device import use_late_device
from tests.engine.mixed_requests import answers, assert_same, random_traffic, request

pytestmark = pytest.mark.timeout(120)
MOST = 4
ON_DEVICE = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST, prompt_lookup_min=1)
FAILING = 11
"""Seed of the request whose constraint fails."""
FAILS = "it is told to fail"


class Replay(Drafter):
    """Drafts what an earlier run answered, as far as `rng` does not put other tokens in its place.

    With `own`, the device drafts for every second request, unless that has a mask.
    """

    @property
    def active(self) -> bool:
        return True

    def __init__(self, answers: dict[str, dict[str, Any]], rng: random.Random, *, own: bool = False) -> None:
        self._answers = answers
        self._rng = rng
        self._own = own
        self.drafted = self.accepted_own = 0

    def _is_own(self, request: RequestState) -> bool:
        return self._own and request.constraint is None and request.record.seed % 2 == 0

    def on_sampled(self, request: RequestState, num_drafts: int, sampled: Sequence[int]) -> int:
        assert num_drafts >= len(sampled) - 1, "drafts that are none are not accepted"
        self.accepted_own += len(sampled) - 1 if self._is_own(request) else 0
        return num_drafts

    def propose(self, request: RequestState, most: int) -> list[int]:
        if self._is_own(request):
            return [OWN] * self._rng.randint(0, min(most, MOST))
        start = len(request.tokens) + request.pending - request.num_prompt
        right = self._answers[request.record.id]["tokens"][start : start + self._rng.randint(0, min(most, MOST))]
        wrong = self._rng.choice([0.0, 0.3, 1.0])
        self.drafted += len(right)
        return [self._rng.randrange(512) if self._rng.random() < wrong else token for token in right]


def on_host(_: Callable[..., None]) -> dict[str, Any]:
    return {}


def on_device(patch: Callable[..., None]) -> dict[str, Any]:
    use_late_device(patch)
    return {"speculative": ON_DEVICE}


def on_recording_device(patch: Callable[..., None]) -> dict[str, Any]:
    use_late_device(patch, recorded=True)
    return {"speculative": ON_DEVICE}


def in_stages(_: Callable[..., None]) -> dict[str, Any]:
    return {"layout": ParallelLayout(pipeline=2), "kv_blocks": 16}


def in_recording_stages(patch: Callable[..., None]) -> dict[str, Any]:
    patch(processes, "WORKER", ("tests.engine.parallel.late_worker", "recorded"))
    return in_stages(patch)


def in_stages_on_devices(patch: Callable[..., None]) -> dict[str, Any]:
    patch(processes, "WORKER", ("tests.engine.parallel.late_worker", "eager"))
    return in_stages(patch)


def in_shards(_: Callable[..., None]) -> dict[str, Any]:
    return {"layout": ParallelLayout(tensor=2), "kv_blocks": 7}


def with_tiers(_: Callable[..., None]) -> dict[str, Any]:
    return {"tiers": TiersConfig(cpu_bytes=1 << 22), "preempt": "swap"}


def unmasked(_: EngineRequest) -> None:
    """Gives no request a constraint."""


class SomeTokens:
    """Allows a few tokens, which depend on the output so far, or first all of them; nothing may follow after 50."""

    words = VOCAB // 32

    def __init__(self, key: int) -> None:
        self._key = key
        self._output: list[int] = []
        self._free = 8 * (key % 2)
        self.error: str | None = None

    def _allowed(self, output: list[int]) -> set[int]:
        if len(output) < self._free:
            return set(range(VOCAB))
        rng = random.Random(zlib.crc32(pack_tokens(output), self._key))
        return set(rng.sample(range(VOCAB), rng.choice([1, 5, 100])))

    @staticmethod
    def fill(rows: Sequence[MaskRow], bits: bytearray) -> None:
        size = 4 * SomeTokens.words
        for constraint, drafts, first in rows:
            assert isinstance(constraint, SomeTokens)
            if constraint._key == FAILING and len(constraint._output) > 3:
                constraint.error = FAILS
            for count in range(len(drafts) + 1):
                mask = sum(1 << token for token in constraint._allowed([*constraint._output, *drafts[:count]]))
                bits[size * (first + count) : size * (first + count + 1)] = mask.to_bytes(size, "little")

    def restricts(self, tokens: int) -> bool:
        return len(self._output) + tokens > self._free

    @property
    def is_finished(self) -> bool:
        return len(self._output) == 50

    def advance(self, token: int) -> None:
        assert token in self._allowed(self._output), "what is not allowed is never sampled"
        self._output.append(token)

    def forced(self, most: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < most and len(following := self._allowed([*self._output, *tokens])) == 1:
            tokens += following
        return tokens

    def allowed(self, drafts: Sequence[int]) -> int:
        fits = [draft in self._allowed([*self._output, *drafts[:at]]) for at, draft in enumerate(drafts)]
        return next((at for at, fit in enumerate(fits) if not fit), len(drafts))


def masked(request: EngineRequest) -> SomeTokens | None:
    """Gives most requests a constraint, also such with penalties, bias, logprobs or a filter.

    Those with a list of allowed tokens have none: it would have no token in common with some masks.
    """
    free = request.pooling is not None or request.params.allowed_token_ids is not None or request.seed % 3 == 0
    return None if free else SomeTokens(request.seed)


@pytest.mark.parametrize("constrain", [unmasked, masked])
@pytest.mark.parametrize("name", ["qwen3-mixed", "deepseek-v3"])
@pytest.mark.parametrize("where", [on_host, on_device, on_recording_device, in_stages, in_recording_stages, in_shards, with_tiers])
@pytest.mark.matrix
def test_every_kind_of_request_gets_the_tokens_that_it_gets_without(
    where: Callable[..., dict[str, Any]], name: str, constrain: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, where, constrain, tmp_path, monkeypatch)


STATES = ("qwen3.5", "kimi-linear", "granite-hybrid", "jamba", "lfm2", "falcon-h1", "falcon-mamba")
"""Models with a recurrent state: one of each kind of memory, then one that attends in the same layers, and one of a state alone."""


@pytest.mark.parametrize("constrain", [unmasked, masked])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("where", [on_host, on_device, in_stages, in_stages_on_devices, in_shards, with_tiers])
@pytest.mark.whole
def test_a_state_goes_on_behind_the_last_accepted_draft(
    where: Callable[..., dict[str, Any]], name: str, constrain: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, where, constrain, tmp_path, monkeypatch)


@pytest.mark.parametrize("where", [on_host, on_device, in_stages, with_tiers])
@pytest.mark.whole
def test_drafts_stay_in_their_chunk(where: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare("llama4-chunks", where, unmasked, tmp_path, monkeypatch)


@pytest.mark.parametrize(("where", "name"), [(on_host, "qwen3.5"), (on_device, "lfm2")])
def test_a_state_goes_on_behind_the_last_accepted_draft_in_short(
    where: Callable[..., dict[str, Any]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, where, unmasked, tmp_path, monkeypatch)


@pytest.mark.parametrize("where", [on_host, on_device])
def test_a_step_that_fails_leaves_no_drafts_behind(
    where: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps fail before it is known which drafts are accepted: their requests begin again, and others may have their slots."""
    write_checkpoint(tmp_path, FAMILIES["lfm2"])
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = [EngineRequest(id=f"r{n}", prompt_ids=[7 + n] * (3 + n), params=params, seed=n) for n in range(4)]
    whole, steps, failed, settled = Decoder.logits, itertools.count(), list[int](), list[int]()
    settle = DraftedStates.settle

    def logits(self: Decoder, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if 1 + MOST < len(hidden) < 4 * (1 + MOST) and next(steps) % 4 == 3:  # what fails alone is not tried again
            failed.append(len(hidden))
            raise RuntimeError("no memory")
        return whole(self, hidden, out)

    def count(self: DraftedStates, lengths: torch.Tensor) -> None:
        settled.append(len(self._open))
        settle(self, lengths)

    with core_for(tmp_path, kv_blocks=400) as core:
        expected = answers(core, asked)
    settings = where(monkeypatch.setattr)
    with core_for(
        tmp_path, **{"kv_blocks": 400, "speculative": SpeculativeConfig(num_speculative_tokens=MOST), **settings}
    ) as core:
        core.scheduler.drafter = Replay(expected, random.Random(0))
        monkeypatch.setattr(Decoder, "logits", logits)
        monkeypatch.setattr(DraftedStates, "settle", count)
        assert_same(answers(core, asked), expected)
    assert len(failed) > 2 and max(settled, default=0) == int(where is on_device), "a step settles its own rows alone"


KV_BLOCKS = {"qwen3-mixed": 14, "llama4-chunks": 17, "deepseek-v3": 18, "falcon-mamba": 180}
KV_BLOCKS_BESIDE_STATES = 29


def compare(
    name: str,
    where: Callable[..., dict[str, Any]],
    constrain: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compares what random requests get with drafts, right ones and wrong ones, with what they get without."""
    write_checkpoint(tmp_path, FAMILIES[name] if name in FAMILIES else VARIANTS[name])
    kv_blocks = KV_BLOCKS.get(name, KV_BLOCKS_BESIDE_STATES)
    expected = random_traffic(tmp_path, kv_blocks=kv_blocks, constrain=constrain)
    settings = {"kv_blocks": kv_blocks, "speculative": SpeculativeConfig(num_speculative_tokens=MOST)} | where(monkeypatch.setattr)
    on_device = settings["speculative"] is ON_DEVICE
    drafter = Replay(expected, random.Random(0), own=on_device)
    if name not in ("qwen3-mixed", "llama4-chunks"):
        # Every rank has whole latents, or blocks of a state; these are larger where a stage's layers are fewer.
        several_stages = "layout" in settings and settings["layout"].pipeline > 1
        settings["kv_blocks"] = 2 * kv_blocks if name in STATES and several_stages else kv_blocks
    ran = count_recorded(monkeypatch)
    found = random_traffic(tmp_path, drafter, constrain=constrain, **settings)
    assert drafter.drafted > 100 and (drafter.accepted_own > 0) is on_device
    if constrain is masked:  # with drafts it may have a token more when it fails
        assert found.pop(f"r{FAILING}")["end"] == expected.pop(f"r{FAILING}")["end"] == ("error", FAILS)
    assert_same(found, expected)
    assert all(answer["end"][1] is None for answer in found.values())
    replayed = {shape for shape, times in ran.items() if times > 1 and shape.width > 1}
    assert len(replayed) > 2 or where is not on_recording_device


def count_recorded(monkeypatch: pytest.MonkeyPatch) -> Counter[StepShape]:
    """Counts the runs of recorded steps from now on, in this process; the first of each size records it."""
    ran, run = Counter[StepShape](), Graphs.run

    def counted(self: Graphs, shape: StepShape, work: Callable[[], None]) -> None:
        ran[shape] += 1
        run(self, shape, work)

    monkeypatch.setattr(Graphs, "run", counted)
    return ran


def test_the_device_drafts_while_steps_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that repeat, for they have few tokens to choose from; with the drafter that users have."""
    write_checkpoint(tmp_path, VARIANTS["llama3.1"])
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 0.0, "frequency_penalty": 0.01}]
    requests = [
        EngineRequest(
            id=str(number),
            prompt_ids=[5, 6, 7, 8] * 3,
            params=SamplingParams(max_tokens=60, ignore_eos=True, allowed_token_ids=[5, 6, 7], **kind),
            seed=number,
        )
        for number, kind in enumerate(kinds)
    ]
    with core_for(tmp_path) as core:
        expected = answers(core, requests)
    use_late_device(monkeypatch.setattr)
    observe = VerifyCost.observe
    # What a busy machine makes of the time of a step would decide whether drafts pay.
    monkeypatch.setattr(VerifyCost, "observe", lambda cost, tokens, _seconds: observe(cost, tokens, (20 + tokens) / 1000))
    with core_for(tmp_path, speculative=replace(ON_DEVICE, prompt_lookup_min=2)) as core:
        plans: list[StepPlan] = []
        monkeypatch.setattr(core.executor, "submit", noted(core.executor.submit, plans))
        found, stats = answers(core, requests), core.scheduler.stats
    assert_same(found, expected)
    assert 0 < stats.spec_accepted_tokens_total <= stats.spec_draft_tokens_total <= sum(sum(plan.num_drafts) for plan in plans)
    assert {OWN} == {draft for plan in plans for draft in unpack_tokens(plan.drafts)}


def test_a_draft_that_the_device_does_not_find_counts_for_no_penalty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's place has no token then, and it is alone in the first slot, so nothing lies before its counts."""
    write_checkpoint(tmp_path, VARIANTS["llama3.1"])
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, frequency_penalty=0.5)
    alone = [EngineRequest(id="a", prompt_ids=list(range(100, 130)), params=params)]
    with core_for(tmp_path) as core:
        expected = answers(core, alone)
    use_late_device(monkeypatch.setattr)
    with core_for(tmp_path, speculative=replace(ON_DEVICE, prompt_lookup_min=5)) as core:
        core.scheduler.drafter = drafter = Replay(expected, random.Random(0), own=True)
        assert_same(answers(core, alone), expected)
    assert not drafter.accepted_own


def noted(submit: Callable[[StepPlan], None], plans: list[StepPlan]) -> Callable[[StepPlan], None]:
    def call(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    return call


def test_masks_that_do_not_come_end_their_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, VARIANTS["llama3.1"])
    monkeypatch.setattr(masks, "MASK_SECONDS", 0.2)
    with core_for(tmp_path) as core:
        core.scheduler.take_masks = list
        found = answers(
            core, [request(random.Random(n), n) for n in range(4)], lambda one: SomeTokens(2) if one.id == "r1" else None
        )
    assert found["r1"]["end"] == ("error", masks.NO_MASK) and not found["r1"]["tokens"]
    assert all(found[name]["end"][1] is None for name in ("r0", "r2", "r3"))
