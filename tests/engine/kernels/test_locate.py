"""Positions of a step's tokens by the kernel are those by torch, for any step, padded or not; so is what it accepts."""

import random
from dataclasses import fields

import pytest
import torch
from starling_engine.kernels import accept, sample
from starling_engine.kernels import locate as kernel
from starling_engine.kv.spec import KVGroup, KVSpec
from starling_engine.native import reference
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.step import FOLLOWS, NewRequest, StepPlan
from starling_engine.token_packing import pack_tokens
from starling_engine.worker.device.device_positions import DevicePositions
from starling_engine.worker.device.device_sampler import DeviceSampler
from starling_engine.worker.device.step_buffer import StepShape
from starling_engine.worker.device.step_writer import Fields, StepWriter
from starling_engine.worker.host.batch import InputBatch

from .compiled import compiled

SLOTS, LONGEST, BLOCK = 40, 200, 8
LENGTH = 20
MADE = ("ids", "positions", "targets", "context_lens", "ends")
"""Fields that are filled in."""


def _plan(rng: random.Random, *, decode: bool) -> StepPlan:
    """Returns a step of prompts, decodes, and decodes with drafts, of requests that enter with it."""
    slots = rng.sample(range(SLOTS), SLOTS - 3)
    starts, counts, drafts, new = [], [], [], []
    for slot in slots:
        follows = decode or rng.random() < 0.6
        width = 0 if decode or not follows else rng.randint(0, 4)
        starts.append(FOLLOWS if follows else rng.randint(0, LENGTH - 1))
        counts.append(1 + width if follows else rng.randint(1, LENGTH - starts[-1]))
        drafts.append(width)
        ids = pack_tokens([rng.randrange(50) for _ in range(LENGTH)])
        new.append(NewRequest(slot, ids, LENGTH, [[], []], 0, SamplingParams(), None))
    given = pack_tokens([rng.randrange(50) for _ in range(sum(drafts))])
    return StepPlan(0, 0, slots, starts, counts, [True] * len(slots), new, num_drafts=drafts, drafts=given)


def _step(rng: random.Random, device: torch.device, *, decode: bool) -> Fields:
    groups = [KVGroup(KVSpec(BLOCK, 1, 8, 4), (0,)), KVGroup(KVSpec(BLOCK, 1, 8, 4), (1,))]
    batch = InputBatch(groups, SLOTS, LONGEST, BLOCK)
    writer = StepWriter(batch, InlineQueue(), device, 1024, 300)
    plan = _plan(rng, decode=decode)
    batch.apply(plan)
    step = batch.gather(plan)
    samples = step.samples(batch.sampling_rows(plan))
    tokens, rows, more = len(step.ids), len(step.slots), rng.choice([0, 3])
    shape = StepShape(tokens + more, rows + more, len(samples) + more, width=1 if decode else 0)
    return writer.write(plan, step, samples, shape)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_gives_what_torch_gives(seed: int, decode: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    f = _step(rng, device, decode=decode)
    width = LONGEST // BLOCK + 1
    tables = torch.randint(0, 90, (2, SLOTS + 1, width), generator=generator, dtype=torch.int32).to(device)
    monkeypatch.setenv(INTERPRETED, "1")
    positions = DevicePositions(SLOTS, BLOCK, device)
    positions.last.copy_(torch.randint(0, 50, (SLOTS + 1,), generator=generator))
    positions.lengths.copy_(torch.randint(1, LONGEST - 8, (SLOTS + 1,), generator=generator))
    before = {field.name: getattr(f, field.name).clone() for field in fields(f) if field.name != "sampling_metadata"}
    positions._locate(f, tables)
    expected = {name: getattr(f, name).clone() for name in MADE}
    for name, value in before.items():
        getattr(f, name).copy_(value if name not in MADE or name == "ids" else torch.full_like(value, -7))
    called = []
    monkeypatch.setattr(kernel, "_locate", _Noted(kernel._locate, called))
    positions.locate(f, tables)
    assert called, "the kernel is what ran"
    for name, value in expected.items():
        made = getattr(f, name)
        # The spare place behind the ids takes what no row is fed.
        assert torch.equal(made[:-1], value[:-1]) if name == "ids" else torch.equal(made, value), name


VOCABULARY = 50


def _logits(f: Fields, generator: torch.Generator) -> torch.Tensor:
    """Returns logits by which most drafts are what is drawn."""
    logits = torch.randn(len(f.sampled), VOCABULARY, generator=generator)
    following = f.ids[f.sampled + 1].cpu()
    liked = torch.rand(len(following), generator=generator) < 0.7
    logits[torch.arange(len(following))[liked], following[liked]] = 9.0
    return logits


def test_accepts_what_torch_accepts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch behind the draw gives tokens, their logits, accepted drafts, and what the next step begins with."""
    rows, rng, generator = 5, random.Random(0), torch.Generator().manual_seed(0)
    f = _step(rng, device, decode=False)
    f = f.samples(rows, int((1 + f.num_drafts[:rows]).sum()))
    count, most_drafts = len(f.sampled), int(f.num_drafts.max())
    f.ends.copy_(torch.randint(1, LONGEST, f.ends.shape, generator=generator))
    logits = _logits(f, generator).to(device)
    monkeypatch.setenv(INTERPRETED, "1")
    found: list[list[torch.Tensor]] = []
    for in_torch in (True, False):
        positions = DevicePositions(SLOTS, BLOCK, device)
        positions.in_torch = in_torch
        sampler = DeviceSampler(reference.sample, count, VOCABULARY, positions)
        sampler.sample(f, logits, most_drafts)
        found.append([each.clone() for each in (sampler.out, positions.last, positions.lengths)])
        sampler.out[::3, 0] = 3
        sampler.accept(f, most_drafts)
        found[-1] += [sampler.out, positions.last, positions.lengths]
    for by_torch, by_kernel in zip(*found, strict=True):
        assert torch.equal(by_torch, by_kernel)
    accepted = found[0][0][:, 0] == found[0][0][:, 2]
    assert accepted.any() and not accepted.all(), "some drafts are accepted, and others are not"


class _Noted:
    def __init__(self, launched, called):
        self._launched, self._called = launched, called

    def __getitem__(self, grid):
        self._called.append(grid)
        return self._launched[grid]


def launch(tokens: int, rows: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    row, sample, slot = empty(rows), empty(rows), empty(257)
    kernel.locate(
        ids=empty(tokens + 1),
        token_rows=empty(tokens),
        query_start=empty(rows + 1, dtype=torch.int32),
        slots=row,
        starts=row,
        feed_slots=row,
        feed_at=row,
        sampled=sample,
        last=slot,
        lengths=slot,
        tables=empty(2, 257, 2049, dtype=torch.int32),
        positions=empty(tokens),
        targets=empty(2, tokens),
        context_lens=empty(rows, dtype=torch.int32),
        ends=sample,
        block_size=16,
    )


def test_compiles_once_for_steps_of_any_size() -> None:
    (small,), (large,) = compiled(launch, 1, 1), compiled(launch, 4096, 256)
    assert small.stack == 0 and small.ptx == large.ptx


def launch_accept(rows: int, drawn: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    parts = sample.split_row(rows, 151_936)[1]
    logits, values = empty(rows, 151_936, dtype=torch.float32), empty(rows, parts, dtype=torch.float64)
    found = sample.Drawn(logits, values, empty(rows, parts, dtype=torch.int32), 128) if drawn else None
    row, slot = empty(rows), empty(257)
    named = dict.fromkeys(("sampled", "sampled_slots", "ends", "first", "num_drafts"), row)
    accept.accept(empty(rows, 3), found, ids=empty(rows + 1), last=slot, lengths=slot, **named)


@pytest.mark.parametrize("drawn", [True, False])
def test_accepting_compiles_once_for_steps_of_any_size(drawn: bool) -> None:
    (small,), (large,) = compiled(launch_accept, 1, drawn), compiled(launch_accept, 256, drawn)
    assert small.stack == 0 and small.ptx == large.ptx
