"""Positions of a step's tokens by the kernel are those by torch, for any step, padded or not."""

import random
from dataclasses import fields

import pytest
import torch
from starling_engine.kernels import locate as kernel
from starling_engine.kv.spec import KVGroup, KVSpec
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.step import FOLLOWS, NewRequest, StepPlan
from starling_engine.token_packing import pack_tokens
from starling_engine.worker.device.device_positions import DevicePositions
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
