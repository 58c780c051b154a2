"""The draw: the largest of scaled logit + Gumbel noise among the tokens that the filters keep. Reads each logit once.

Several programs share a row, and a second kernel compares their best. Of equals the lowest token wins, so the result does not
depend on the number of programs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine import rng
from starling_engine.kernels.filters import scaled_logits, thresholds
from starling_engine.native.sampling_metadata import SamplingMetadata, has_rows

GOLDEN, MIX_1, MIX_2 = tl.constexpr(rng.GOLDEN), tl.constexpr(rng.MIX_1), tl.constexpr(rng.MIX_2)
TILE = tl.constexpr(2048)
WARPS = 8  # 8 logits a thread: their noise, in double, takes 16 registers
PROGRAMS = 1024  # about eight for each multiprocessor of a large GPU
SLACK = tl.constexpr(1e-3)


@triton.jit
def _mix(z):
    """SplitMix64's finaliser; see `rng`."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _random(key, token):
    return _mix(key + GOLDEN * (token + 1).to(tl.uint64))


@triton.jit
def _gumbel(random):
    """Computes `rng.gumbel` in double: fp32 would lose the numbers near 1, whose noise is the largest."""
    uniform = ((random >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _most(scaled, random):
    """Returns an upper bound of scaled + noise, in fp32, with one logarithm: -log(-log u) <= -log(1 - u).

    It is close where the noise is large. SLACK covers a logarithm's error, and four roundings of the logit cover the sum's.
    """
    rest = ((random ^ 0xFFFFFFFFFFFFFFFF) >> 11).to(tl.float32) * 1.1102230246251565e-16
    return tl.maximum(scaled * 1.00000024, scaled * 0.99999976) + (SLACK - tl.log(rest))


@triton.jit
def _draw(logits, stride, vocab, temperature, lowest, seed, position, values, tokens, span, FILTERED: tl.constexpr):
    """Program (row, part): writes the best of tokens [part * span, + span), its value in double and the token."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    degrees = tl.load(temperature + row)
    floor = float("-inf")
    if FILTERED:
        floor = tl.load(lowest + row)
    key = _mix(tl.load(seed + row).to(tl.uint64) + GOLDEN * (tl.load(position + row) + 1).to(tl.uint64))
    best = tl.full((), float("-inf"), tl.float64)
    chosen = part * span
    for start in range(part * span, tl.minimum(part * span + span, vocab), TILE):
        token = start + tl.arange(0, TILE)
        scaled = scaled_logits(logits + row * stride, token, token < vocab, degrees)
        kept = (scaled >= floor) & (scaled > float("-inf"))
        if degrees == 0:
            most = scaled
        else:
            most = tl.where(kept, _most(scaled, _random(key, token)), float("-inf"))
        # Two logarithms in double are slow: only the few tiles that can hold a better token need them.
        if tl.max(most, 0) > best:
            value = scaled.to(tl.float64)
            if degrees != 0:
                value = tl.where(kept, value + _gumbel(_random(key, token)), float("-inf"))
            largest = tl.max(value, 0)
            if largest > best:
                best = largest
                chosen = tl.min(tl.where(value == largest, token, vocab), 0)
    tl.store(values + row * parts + part, best)
    tl.store(tokens + row * parts + part, chosen)


@triton.jit
def best_of_parts(values, tokens, row, parts, BLOCK: tl.constexpr):
    """Returns the best token, int64, of the parts of row `row`, an int64."""
    part = tl.arange(0, BLOCK)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=part < parts, other=2147483647)
    return tl.min(tl.where(value == tl.max(value, 0), token, 2147483647), 0).to(tl.int64)


@triton.jit(do_not_specialize=["parts"])
def _pick(values, tokens, out, parts, BLOCK: tl.constexpr):
    """Program (row): writes the best token of a row's parts."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, best_of_parts(values, tokens, row, parts, BLOCK))


@dataclass(frozen=True, slots=True)
class Drawn:
    """The best of each part of each row of `logits`: values [S, parts] in double, and tokens [S, parts] int32.

    `block` is a power of two that has room for the most parts of a row, so that one kernel serves any number of rows.
    """

    logits: Tensor
    values: Tensor
    tokens: Tensor
    block: int


def sample(
    logits: Tensor,
    metadata: SamplingMetadata[Tensor],
    seed: Tensor,
    position: Tensor,
    *,
    filtered: bool = True,
) -> Tensor:
    """Samples one token [S] int64 for each row of logits, as `draw` does."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(out):
        drawn = draw(logits, metadata, seed, position, filtered=filtered)
        _pick[(len(out),)](drawn.values, drawn.tokens, out, drawn.values.shape[1], BLOCK=drawn.block, num_warps=1)
    return out


def draw(
    logits: Tensor,
    metadata: SamplingMetadata[Tensor],
    seed: Tensor,
    position: Tensor,
    *,
    filtered: bool = True,
) -> Drawn:
    """Draws for each row of logits [S, V] fp32, S > 0; `native.reference.sample` defines the filters.

    seed, position [S] int64. `filtered` is False where no row has a filter, which saves two launches.

    The noise is that of the reference, to a rounding of doubles. So is the token, unless a filter differs (see `thresholds`). A row
    with NaN or +inf gives the first of these.

    Moves 4 S V bytes, and 4 V more for each row with a filter.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and seed.dtype == position.dtype == torch.int64
    assert logits.stride(1) == 1 and has_rows(metadata, rows)
    for column in (seed, position):
        assert column.shape == (rows,) and column.is_contiguous()
    lowest = thresholds(logits, metadata) if filtered else metadata.temperature
    span, parts = split_row(rows, vocab)
    values = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _draw[(rows, parts)](
        logits,
        logits.stride(0),
        vocab,
        metadata.temperature,
        lowest,
        seed,
        position,
        values,
        tokens,
        span,
        FILTERED=filtered,
        num_warps=WARPS,
    )
    return Drawn(logits, values, tokens, triton.next_power_of_2(triton.cdiv(vocab, TILE.value)))


def split_row(rows: int, vocab: int) -> tuple[int, int]:
    """Returns (tokens of a part, a multiple of TILE; parts of a row), such that a few rows keep all multiprocessors busy."""
    tiles = triton.cdiv(vocab, TILE.value)
    tiles_each = triton.cdiv(tiles, min(tiles, triton.cdiv(PROGRAMS, rows)))
    return tiles_each * TILE.value, triton.cdiv(tiles, tiles_each)
