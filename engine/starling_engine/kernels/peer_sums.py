"""Sums over the GPUs of one machine, each in one kernel: ranks read each other's parts from memory that all can reach.

A rank's region, which all others read and write:

    | flags [2, BLOCKS, ranks] int32 | counts [BLOCKS] int32 | two buffers of BUFFER_BYTES |

one shot   Block b of a rank copies its piece into a buffer and sets a flag for block b of every rank. It waits for their flags, and
           adds up all parts: with R ranks each reads R - 1 parts of others.
two shots  Each rank adds up every R-th tile alone. It writes the sum over its own part of that tile, which nobody else reads, and
           sets a second flag. Then all read the sums of others: 2 (R - 1) / R parts, for one exchange of flags more.

The buffers take turns. A rank that begins a sum has ended the one before; so all others have ended the one before that, and no
longer read its buffer.

Each block counts the sums on the device, so that a captured graph goes on counting. The grid is the same for every sum, so that
all blocks count alike. Sums are made in the order of the ranks and in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.norm import store_normed
from starling_engine.kernels.round_rows import row_shape
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding, empty_rows

BLOCKS = 32
"""Few enough to run at once beside other kernels: a block waits for the same block of other ranks."""

TILE, LARGE_TILE = 2048, 8192
"""Elements that a block takes at a time. Of large sums it takes more, by twice as many threads: more are on their way at once."""

LARGE_BYTES = BLOCKS * TILE * 2
"""Sums of more bytes are large: in 16 bits they are more than a tile a block."""

BUFFER_BYTES = 8 << 20


def region_bytes(ranks: int) -> int:
    return _buffers_at(ranks) + 2 * BUFFER_BYTES


def _buffers_at(ranks: int) -> int:
    """Returns the offset behind flags and counts where a cache line begins."""
    return -(-BLOCKS * (2 * ranks + 1) * 4 // 128) * 128


@triton.jit
def _begin(regions, rank, RANKS: tl.constexpr, BLOCKS: tl.constexpr, BUFFERS_AT: tl.constexpr, BUFFER_BYTES: tl.constexpr):
    """Returns the number of the sum that begins, and where in a region its buffer is."""
    counts = tl.load(regions + rank).to(tl.pointer_type(tl.int32)) + 2 * BLOCKS * RANKS
    number = tl.load(counts + tl.program_id(0)) + 1
    return number, BUFFERS_AT + (number & 1) * BUFFER_BYTES


@triton.jit
def _end(regions, rank, number, RANKS: tl.constexpr, BLOCKS: tl.constexpr):
    counts = tl.load(regions + rank).to(tl.pointer_type(tl.int32)) + 2 * BLOCKS * RANKS
    tl.store(counts + tl.program_id(0), number)


@triton.jit
def _part(regions, peer, buffer, dtype: tl.constexpr):
    """Returns where a rank's part of the sum is."""
    return tl.multiple_of((tl.load(regions + peer) + buffer).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _meet(regions, rank, number, STEP: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Waits until this block of every rank has come here. What they have written before can be read from now on.

    SLOTS is the power of two that holds the ranks. A thread for each of them sets its flag, and looks at its own.
    """
    first = (STEP * BLOCKS + tl.program_id(0)) * RANKS
    peers = tl.arange(0, SLOTS)
    here = peers < RANKS
    theirs = tl.load(regions + peers, mask=here, other=0).to(tl.pointer_type(tl.int32)) + first + rank
    own = tl.load(regions + rank).to(tl.pointer_type(tl.int32)) + first
    # These threads speak for what all threads of the block have written.
    tl.debug_barrier()
    tl.atomic_xchg(theirs, tl.full([SLOTS], 0, tl.int32) + number, mask=here, sem="release", scope="sys")
    behind = True
    while behind:
        flags = tl.atomic_add(own + peers, tl.zeros([SLOTS], tl.int32), mask=here, sem="acquire", scope="sys")
        # Differences, since the count wraps to negative numbers after 2^31 sums.
        behind = tl.min(tl.where(here, flags - number, 0), 0) < 0


@triton.jit
def _summed(regions, buffer, at, mask, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Returns the sum of all parts at these places, rounded to their dtype."""
    total = tl.zeros(at.shape, dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        total += tl.load(_part(regions, peer, buffer, dtype) + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def _one_shot(
    x, regions, size, rank, RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    BUFFERS_AT: tl.constexpr, BUFFER_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (block). See the module's docstring."""
    dtype: tl.constexpr = x.dtype.element_ty
    block = tl.program_id(0)
    number, buffer = _begin(regions, rank, RANKS, BLOCKS, BUFFERS_AT, BUFFER_BYTES)
    mine = _part(regions, rank, buffer, dtype)
    for first in range(block * TILE, size, BLOCKS * TILE):
        at = first + tl.arange(0, TILE)
        tl.store(mine + at, tl.load(x + at, mask=at < size), mask=at < size)
    _meet(regions, rank, number, 0, RANKS, SLOTS, BLOCKS)
    for first in range(block * TILE, size, BLOCKS * TILE):
        at = first + tl.arange(0, TILE)
        tl.store(x + at, _summed(regions, buffer, at, at < size, dtype, RANKS), mask=at < size)
    _end(regions, rank, number, RANKS, BLOCKS)


@triton.jit
def _two_shots(
    x, regions, size, rank, RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    BUFFERS_AT: tl.constexpr, BUFFER_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (block). Takes a tile of each rank at a time: all are loaded before one is stored, so that reads go on together."""
    dtype: tl.constexpr = x.dtype.element_ty
    begin, step = tl.program_id(0) * RANKS * TILE, BLOCKS * RANKS * TILE
    number, buffer = _begin(regions, rank, RANKS, BLOCKS, BUFFERS_AT, BUFFER_BYTES)
    mine = _part(regions, rank, buffer, dtype)
    peer = tl.arange(0, SLOTS)[:, None]
    here = peer < RANKS
    tiles = peer * TILE + tl.arange(0, TILE)[None, :]
    for first in range(begin, size, step):
        at = first + tiles
        mask = here & (at < size)
        tl.store(mine + at, tl.load(x + at, mask=mask), mask=mask)
    _meet(regions, rank, number, 0, RANKS, SLOTS, BLOCKS)
    for first in range(begin, size, step):
        at = first + rank * TILE + tl.arange(0, TILE)
        tl.store(mine + at, _summed(regions, buffer, at, at < size, dtype, RANKS), mask=at < size)
    _meet(regions, rank, number, 1, RANKS, SLOTS, BLOCKS)
    theirs = (tl.load(regions + peer, mask=here, other=0) + buffer).to(tl.pointer_type(dtype))
    theirs = tl.multiple_of(theirs, [16, 16])
    for first in range(begin, size, step):
        at = first + tiles
        mask = here & (at < size)
        tl.store(x + at, tl.load(theirs + at, mask=mask), mask=mask)
    _end(regions, rank, number, RANKS, BLOCKS)


@triton.jit(do_not_specialize=["rows"])
def _one_shot_norm(
    x, residual, weight, out, scales, static, regions, rows, eps, rank, SIZE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    BUFFERS_AT: tl.constexpr, BUFFER_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (block). One shot by whole rows, of which it has every BLOCKS-th. Each then goes through `add_rms_norm`."""
    dtype: tl.constexpr = x.dtype.element_ty
    number, buffer = _begin(regions, rank, RANKS, BLOCKS, BUFFERS_AT, BUFFER_BYTES)
    row = tl.program_id(0) + BLOCKS * tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * SIZE + column[None, :]
    here = (row < rows)[:, None] & (column < SIZE)[None, :]
    tl.store(_part(regions, rank, buffer, dtype) + at, tl.load(x + at, mask=here), mask=here)
    before = tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0)
    _meet(regions, rank, number, 0, RANKS, SLOTS, BLOCKS)
    total = (_summed(regions, buffer, at, here, dtype, RANKS).to(tl.float32) + before).to(dtype)
    tl.store(residual + at, total, mask=here)
    store_normed(total, weights, out, scales, static, row, row < rows, eps, SIZE, GROUP)
    _end(regions, rank, number, RANKS, BLOCKS)


def one_shot_sum(x: Tensor, regions: Tensor, rank: int) -> None:
    """Sums x over the ranks, in place. x is contiguous and has at most BUFFER_BYTES.

    regions [ranks] int64: addresses of every rank's region of `region_bytes(ranks)`, zero before the first sum. All ranks make the
    same calls in the same order, with tensors of one size and dtype.
    """
    _check(x, regions)
    ranks, is_large = len(regions), x.nbytes > LARGE_BYTES
    _one_shot[(BLOCKS,)](
        x, regions, x.numel(), rank, RANKS=ranks, SLOTS=triton.next_power_of_2(ranks), BLOCKS=BLOCKS,
        TILE=LARGE_TILE if is_large else TILE, BUFFERS_AT=_buffers_at(ranks), BUFFER_BYTES=BUFFER_BYTES,
        num_warps=16 if is_large else 8,
    )  # fmt: skip


def two_shot_sum(x: Tensor, regions: Tensor, rank: int) -> None:
    """Does as `one_shot_sum`, to the last bit, and reads less of others."""
    _check(x, regions)
    ranks = len(regions)
    _two_shots[(BLOCKS,)](
        x, regions, x.numel(), rank, RANKS=ranks, SLOTS=triton.next_power_of_2(ranks), BLOCKS=BLOCKS, TILE=TILE,
        BUFFERS_AT=_buffers_at(ranks), BUFFER_BYTES=BUFFER_BYTES, num_warps=8,
    )  # fmt: skip


def most_norm_rows(size: int) -> int:
    """Returns how many rows of `size` elements `one_shot_sum_norm` takes: those that its programs hold at once."""
    return 2 * BLOCKS * row_shape(size)[1]


def one_shot_sum_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, regions: Tensor, rank: int, rounding: RowRounding | None = None
) -> Tensor | RoundedRows:
    """Does as `one_shot_sum` and then `add_rms_norm` with x [T, K] as its output. Returns x.

    With `rounding` it returns what `rms_norm_rounded` does, and x stays as it is. T is at most `most_norm_rows(K)`.
    """
    _check(x, regions)
    rows, size = x.shape
    assert rows <= most_norm_rows(size)
    assert residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()
    assert weight.dtype in (x.dtype, torch.float32) and weight.shape == (size,) and weight.is_contiguous()
    rounded = None if rounding is None else empty_rows(rows, size, rounding, x.dtype, x.device)
    block, _, warps = row_shape(size)
    ranks = len(regions)
    _one_shot_norm[(BLOCKS,)](
        x, residual, weight, x if rounded is None else rounded.codes, None if rounded is None else rounded.scales,
        None if rounding is None else rounding.scale, regions, rows, eps, rank, SIZE=size,
        GROUP=0 if rounding is None else rounding.group, ROWS=most_norm_rows(size) // BLOCKS,
        BLOCK=block, RANKS=ranks, SLOTS=triton.next_power_of_2(ranks), BLOCKS=BLOCKS, BUFFERS_AT=_buffers_at(ranks),
        BUFFER_BYTES=BUFFER_BYTES, num_warps=warps,
    )  # fmt: skip
    return x if rounded is None else rounded


def _check(x: Tensor, regions: Tensor) -> None:
    assert x.is_contiguous() and 0 < x.nbytes <= BUFFER_BYTES and regions.dtype == torch.int64
