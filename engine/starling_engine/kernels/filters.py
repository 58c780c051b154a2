"""Top-k, top-p and min-p without a sort: each keeps the logits from some value up, so each is a search for that value.

One pass over the row notes the largest logit and the mass of each group of GROUP logits. They give a lower bound of the threshold,
and with it the few groups that can hold the threshold. Only these are searched, by halving the range of floats twice at a time. In
a distribution so flat that no group can be left out, the search reads the whole row each time. Rows without a filter end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.native.sampling_metadata import SamplingMetadata

GROUP = tl.constexpr(32)
CHUNK = tl.constexpr(128)  # groups at a time
SURVEY_WARPS = 8  # 16 logits a thread: four loads of 16 bytes in flight
SEARCH_WARPS = 16  # one program has a row to itself, so latency counts; 8 logits and 3 doubles for each a thread fit its registers
COARSE = tl.constexpr(1 << 14)
LEAST_KEY = tl.constexpr(-2139095041)  # of -inf


@triton.jit
def scaled_logits(logits, at, here, temperature):
    """Returns logits[at] / temperature (0: unscaled), rounded as in the reference; -inf where not `here`.

    NaN becomes +inf: it is chosen before any other, and the chosen token shows that the row is broken.
    """
    values = tl.div_rn(tl.load(logits + at, mask=here, other=float("-inf")), tl.where(temperature == 0, 1.0, temperature))
    return tl.where(values == values, values, float("inf"))


@triton.jit
def key_of(x):
    """Maps fp32 to int32 in the same order; -0.0 comes right before 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Inverts `key_of`."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _settings(row, vocab, temperature, top_k, top_p, min_p):
    """Returns the row's temperature, top_k (0: off), top_p and min_p, and whether the row has a filter."""
    degrees, k, p, m = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k < vocab, k, 0)
    return degrees, k, p, m, (degrees != 0) & ((k > 0) | (p < 1) | (m > 0))


@triton.jit
def _survey(logits, stride, vocab, temperature, top_k, top_p, min_p, maxima, masses, groups):
    """Writes the largest of each group of scaled logits, and the sum of exp(logit - largest)."""
    row = tl.program_id(0)
    degrees, _, _, _, filtered = _settings(row, vocab, temperature, top_k, top_p, min_p)
    if not filtered:
        return
    group = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scaled = scaled_logits(logits + row.to(tl.int64) * stride, token, token < vocab, degrees)
    largest = tl.max(scaled, axis=1)
    finite = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    mass = tl.sum(tl.exp(scaled - finite[:, None]), axis=1)
    at = row.to(tl.int64) * groups + group
    tl.store(maxima + at, largest, mask=group < groups)
    tl.store(masses + at, mass, mask=group < groups)


@triton.jit
def _from_pivots(row_logits, degrees, vocab, listed, count, top, first, second, third, BY_MASS: tl.constexpr):
    """Counts the logits of the listed groups from each of three keys up; with BY_MASS, sums their exp(logit - top)."""
    kind: tl.constexpr = tl.float64 if BY_MASS else tl.int32
    first, second, third = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
    from_first = tl.zeros((CHUNK, GROUP), kind)
    from_second, from_third = from_first, from_first
    for start in range(0, count, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        group = tl.load(listed + entry, mask=entry < count, other=0)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        scaled = scaled_logits(row_logits, token, (entry < count)[:, None] & (token < vocab), degrees)
        key = key_of(scaled)
        if BY_MASS:
            weight = tl.exp(scaled - top).to(kind)
        else:
            weight = tl.full((CHUNK, GROUP), 1, kind)
        from_first += tl.where(key >= first, weight, 0)
        from_second += tl.where(key >= second, weight, 0)
        from_third += tl.where(key >= third, weight, 0)
    return tl.sum(tl.sum(from_first, 1), 0), tl.sum(tl.sum(from_second, 1), 0), tl.sum(tl.sum(from_third, 1), 0)


@triton.jit
def _search(row_logits, degrees, vocab, listed, count, top, wanted, low, BY_MASS: tl.constexpr):
    """Returns the largest key such that the logits from it up count, or weigh, at least `wanted`; those from `low` up do."""
    high = key_of(top).to(tl.int64) + 1
    while high - low > 1:
        gap = high - low
        first = low + tl.maximum(gap // 4, 1)
        second = low + tl.maximum(gap // 2, 1)
        third = low + tl.maximum(3 * gap // 4, 1)
        one, two, three = _from_pivots(row_logits, degrees, vocab, listed, count, top, first, second, third, BY_MASS)
        high = tl.where(three >= wanted, high, tl.where(two >= wanted, third, tl.where(one >= wanted, second, first)))
        low = tl.where(three >= wanted, third, tl.where(two >= wanted, second, tl.where(one >= wanted, first, low)))
    return low


@triton.jit
def _floor(keys, weights, wanted, top):
    """Returns a key, within COARSE of the largest, such that groups whose largest logit is from it up weigh at least `wanted`."""
    low = tl.full((), LEAST_KEY, tl.int64)
    high = key_of(top).to(tl.int64) + 1
    while high - low > COARSE:
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _list_groups(maxima, listed, floor, groups, BLOCK: tl.constexpr):
    """Writes the groups whose largest logit is at least `floor`, and returns their number."""
    group = tl.arange(0, BLOCK)
    chosen = (key_of(maxima) >= floor.to(tl.int32)) & (group < groups)
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), 0) - 1, group, mask=chosen)
    # Other threads of the program read what this one wrote.
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _thresholds(
    logits, stride, vocab, temperature, top_k, top_p, min_p, maxima, masses, lists, groups, lowest, BLOCK: tl.constexpr
):
    """Writes the lowest scaled logit of the row that all filters keep; -inf where there are none."""
    row = tl.program_id(0).to(tl.int64)
    degrees, k, p, m, filtered = _settings(row, vocab, temperature, top_k, top_p, min_p)
    if not filtered:
        tl.store(lowest + row, float("-inf"))
        return
    group = tl.arange(0, BLOCK)
    largest = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
    top = tl.max(largest, 0)
    if tl.abs(top) == float("inf"):
        tl.store(lowest + row, top)
        return
    low = tl.full((), LEAST_KEY, tl.int64)
    if (k > 0) | (p < 1):
        row_logits, listed = logits + row * stride, lists + row * groups
        relative = tl.exp(largest - top).to(tl.float64)
        mass = tl.sum(relative * tl.load(masses + row * groups + group, mask=group < groups, other=0.0), 0)
        # Top-k comes first: top-p then takes the likeliest of those.
        counted = k > 0
        wanted = tl.where(counted, k.to(tl.float64), p.to(tl.float64) * mass)
        low = _floor(key_of(largest), tl.where(counted, 1.0, relative), wanted, top)
        count = _list_groups(largest, listed, low, groups, BLOCK)
        if counted:
            low = _search(row_logits, degrees, vocab, listed, count, top, k, low, False)
        if p < 1:
            if counted:
                mass, _, _ = _from_pivots(row_logits, degrees, vocab, listed, count, top, low, low, low, True)
            low = _search(row_logits, degrees, vocab, listed, count, top, p.to(tl.float64) * mass, low, True)
    if m > 0:
        least = top.to(tl.float64) + tl.log(m.to(tl.float64))
        rounded = least.to(tl.float32)
        low = tl.maximum(low, key_of(rounded).to(tl.int64) + (rounded.to(tl.float64) < least).to(tl.int64))
    tl.store(lowest + row, value_of(low.to(tl.int32)))


def thresholds(logits: Tensor, metadata: SamplingMetadata[Tensor]) -> Tensor:
    """Returns the lowest logit / temperature that the filters of each row keep, [S] fp32; -inf where there are none.

    logits [S, V] fp32. Reads a row with a filter once, and then its listed groups some 12
    times from the L2 cache. Rows without a filter are not read.

    Masses are fp32 exponentials, summed in double in an order that depends on the row alone. So the kept tokens may differ from the
    reference's: by the logits of one value, where the mass from it up is within 1e-6 of top_p.
    """
    rows, vocab = logits.shape
    groups = triton.cdiv(vocab, GROUP.value)
    maxima, masses = logits.new_empty(rows, groups), logits.new_empty(rows, groups)
    lists = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    lowest = logits.new_empty(rows)
    shared = (logits, logits.stride(0), vocab, *metadata, maxima, masses)
    _survey[(rows, triton.cdiv(groups, CHUNK.value))](*shared, groups, num_warps=SURVEY_WARPS)
    _thresholds[(rows,)](*shared, lists, groups, lowest, BLOCK=triton.next_power_of_2(groups), num_warps=SEARCH_WARPS)
    return lowest
