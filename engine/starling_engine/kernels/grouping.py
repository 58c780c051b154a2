"""Sorts a step's pairs of token and expert by the expert's slot, and cuts them into blocks of one slot each, all on the device.

A counting sort: each program counts its chunk of pairs by slot, then each places its own behind those of the chunks before it.
It is stable. A step of one chunk takes one launch, any other two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 512
"""Pairs of one program: one sorts 64 tokens with 8 experts each."""

STEP = 128
"""Pairs that are compared with each other at once, to rank those of equal slots."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """P pairs, numbered as in their [T, top_k]. Pairs of experts that the rank lacks are left out.

    order    [P] int32: the pairs, sorted by slot
    bounds   [3, M] int32: of each block its slot, and where in `order` it starts and ends
    used     [1] int32: the number of blocks, of at most M; the rest of the tensors is undefined
    """

    order: torch.Tensor
    bounds: torch.Tensor
    used: torch.Tensor

    @property
    def most_blocks(self) -> int:
        """M, the most blocks that P pairs can need."""
        return self.bounds.shape[1]


def most_blocks(pairs: int, num_slots: int, block: int) -> int:
    """Returns the most blocks of `pairs`: the last block of every slot may have one pair only."""
    return (pairs + min(pairs, num_slots) * (block - 1)) // block


def sort_into_blocks(expert_slots: torch.Tensor, num_slots: int, block: int) -> Blocks:
    """Cuts pairs into blocks of `block`, the last of each slot with the rest.

    expert_slots [T, top_k] int64, contiguous, are below `num_slots`, which itself stands for an expert that the rank lacks.
    """
    pairs, device = expert_slots.numel(), expert_slots.device
    chunks, bins = triton.cdiv(pairs, CHUNK), max(32, triton.next_power_of_2(num_slots + 1))
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    bounds = torch.empty(3, most_blocks(pairs, num_slots, block), dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    counts = torch.empty(chunks if chunks > 1 else 0, bins, dtype=torch.int32, device=device)
    sizes = {"CHUNK": CHUNK, "BINS": bins, "num_warps": 8}
    if chunks > 1:
        _count[(chunks,)](expert_slots, counts, pairs, num_slots, **sizes)
    _place[(chunks,)](
        expert_slots,
        counts,
        order,
        bounds,
        used,
        pairs,
        num_slots,
        bounds.shape[1],
        chunks,
        BLOCK=block,
        STEP=STEP,
        ALONE=chunks == 1,
        **sizes,
    )
    return Blocks(order, bounds, used)


@triton.jit(do_not_specialize=["pairs"])
def _count(expert_slots, counts, pairs, num_slots, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Writes this program's chunk of counts [chunks, BINS]."""
    chunk = tl.program_id(0)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), _histogram(expert_slots, chunk, pairs, num_slots, CHUNK, BINS))


@triton.jit
def _histogram(expert_slots, chunk, pairs, num_slots, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Counts a chunk's pairs by slot. Pairs past the end count as those of an expert that the rank lacks."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.histogram(tl.load(expert_slots + at, mask=at < pairs, other=num_slots).to(tl.int32), BINS)


@triton.jit(do_not_specialize=["pairs", "most_blocks", "chunks"])
def _place(
    expert_slots,
    counts,
    order,
    bounds,
    used,
    pairs,
    num_slots,
    most_blocks,
    chunks,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ALONE: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    chunk = tl.program_id(0)
    bins, step = tl.arange(0, BINS), tl.arange(0, STEP)
    total, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    if ALONE:
        total += _histogram(expert_slots, 0, pairs, num_slots, CHUNK, BINS)
    else:
        for other in range(chunks):
            found = tl.load(counts + other * BINS + bins)
            total += found
            before += tl.where(other < chunk, found, 0)
    total = tl.where(bins < num_slots, total, 0)
    start = tl.cumsum(total, 0) - total
    base = start + before
    for first in range(0, tl.minimum(CHUNK, pairs - chunk * CHUNK), STEP):
        at = chunk * CHUNK + first + step
        slot = tl.load(expert_slots + at, mask=at < pairs, other=num_slots).to(tl.int32)
        earlier = (slot[:, None] == slot[None, :]) & (step[None, :] < step[:, None])
        rank = tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + tl.gather(base, slot, 0) + rank, at, mask=slot < num_slots)
        base += tl.histogram(slot, BINS)
    if chunk == 0:
        _cut(bounds, used, total, start, bins, most_blocks, BLOCK)


@triton.jit
def _cut(bounds, used, total, start, bins, most_blocks, BLOCK: tl.constexpr):
    """Writes the first block of every slot, then the second of those that have one, and so on."""
    blocks = tl.cdiv(total, BLOCK)
    first = tl.cumsum(blocks, 0) - blocks
    for i in range(tl.max(blocks, 0)):
        at, mask = bounds + first + i, i < blocks
        tl.store(at, bins, mask=mask)
        tl.store(at + most_blocks, start + i * BLOCK, mask=mask)
        tl.store(at + 2 * most_blocks, start + tl.minimum((i + 1) * BLOCK, total), mask=mask)
    tl.store(used, tl.sum(blocks, 0))
