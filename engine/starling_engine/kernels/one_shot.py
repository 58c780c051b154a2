"""The sum of small tensors over the GPUs of one machine, in one kernel: every rank reads all parts itself.

A rank's region, which all others read and write:

    | flags [BLOCKS, ranks] int32 | counts [BLOCKS] int32 | two buffers of BUFFER_BYTES |

Block b of a rank copies its piece into a buffer and sets a flag for block b of every rank. It waits for their flags, and adds up.
The buffers take turns. A rank that begins a sum has ended the one before; so all others have ended the one before that, and no
longer read its buffer.

Each block counts the sums on the device, so that a captured graph goes on counting. The grid is the same for every size, so that
all blocks count alike.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 32
"""Few enough to run at once beside other kernels: a block waits for the same block of other ranks."""

TILE = 2048
BUFFER_BYTES = 1 << 20


def region_bytes(ranks: int) -> int:
    return _buffers_at(ranks) + 2 * BUFFER_BYTES


def _buffers_at(ranks: int) -> int:
    """Returns the offset behind flags and counts where a cache line begins."""
    return -(-BLOCKS * (ranks + 1) * 4 // 128) * 128


@triton.jit
def _one_shot(
    x, regions, size, rank, RANKS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, BUFFERS_AT: tl.constexpr,
    BUFFER_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (block). See the module's docstring."""
    block = tl.program_id(0)
    own = tl.load(regions + rank)
    flags = own.to(tl.pointer_type(tl.int32)) + block * RANKS
    count = own.to(tl.pointer_type(tl.int32)) + BLOCKS * RANKS + block
    number = tl.load(count) + 1
    buffer = BUFFERS_AT + (number & 1) * BUFFER_BYTES
    mine = tl.multiple_of((own + buffer).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for first in range(block * TILE, size, BLOCKS * TILE):
        at = first + tl.arange(0, TILE)
        tl.store(mine + at, tl.load(x + at, mask=at < size), mask=at < size)
    # One thread sets the flags for what all threads of the block have written.
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        their_flag = tl.load(regions + peer).to(tl.pointer_type(tl.int32)) + block * RANKS + rank
        tl.atomic_xchg(their_flag, number, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        # A difference, since the count wraps to negative numbers after 2^31 sums.
        while tl.atomic_add(flags + peer, 0, sem="acquire", scope="sys") - number < 0:
            pass
    for first in range(block * TILE, size, BLOCKS * TILE):
        at = first + tl.arange(0, TILE)
        total = tl.zeros([TILE], dtype=tl.float32)
        for peer in tl.static_range(RANKS):
            theirs = (tl.load(regions + peer) + buffer).to(tl.pointer_type(x.dtype.element_ty))
            total += tl.load(tl.multiple_of(theirs, 16) + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(x + at, total.to(x.dtype.element_ty), mask=at < size)
    tl.store(count, number)


def one_shot_sum(x: Tensor, regions: Tensor, rank: int) -> None:
    """Sums x over the ranks, in place, in their order and in fp32. x is contiguous and has at most BUFFER_BYTES.

    regions [ranks] int64: addresses of every rank's region of `region_bytes(ranks)`, zero before the first sum. All ranks make the
    same calls in the same order, with tensors of one size and dtype.
    """
    assert x.is_contiguous() and x.nbytes <= BUFFER_BYTES and regions.dtype == torch.int64
    ranks = len(regions)
    _one_shot[(BLOCKS,)](
        x, regions, x.numel(), rank, RANKS=ranks, BLOCKS=BLOCKS, TILE=TILE, BUFFERS_AT=_buffers_at(ranks),
        BUFFER_BYTES=BUFFER_BYTES, num_warps=8,
    )  # fmt: skip
