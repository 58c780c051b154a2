"""Kernels of recurrent layers in Triton. `layers.recurrent.RecurrentKernels` says what they compute.

The gated delta rule and the scan run token by token, as in decodes; a sequence's tokens are not spread over the device.

The file is long because each kernel stands beside the function that starts it, and Triton has every argument named in both.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import StateRows
from starling_engine.kernels.round_rows import row_shape

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHANNELS = 256
TOKENS = 8
"""Tokens of a program of the convolution, where a sequence has several."""
COLUMNS = 8
"""Columns of the state that a program holds, in the registers of one warp."""
SCAN_CHANNELS = 32
"""The same of Mamba's, whose columns are shorter: channels that one warp loads at once."""


@triton.jit
def _row(storage, block_stride, tables, s, width, number, SIZE: tl.constexpr, COLUMN: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Points to rows of the state by their numbers among those of all layers."""
    block = tl.load(tables + s * width + COLUMN + number // PER_BLOCK).to(tl.int64)
    return storage + block * block_stride + number % PER_BLOCK * SIZE


@triton.jit
def _tokens(query_start, context_lens, taken, s):
    """Returns a sequence's first token, how many are computed, whether any are before, and whether the state takes them in."""
    begin = tl.load(query_start + s)
    count = tl.load(query_start + s + 1) - begin
    first = tl.load(taken + s)
    return begin, tl.where(first > 0, first, count), tl.load(context_lens + s) > count, first > 0


@triton.jit(do_not_specialize=["width", "block_stride"], do_not_specialize_on_alignment=["slots"])
def _short_convolution(
    x,
    x_stride,
    weight,
    bias,
    out,
    storage,
    block_stride,
    tables,
    width,
    slots,
    query_start,
    context_lens,
    taken,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    CONVOLVE: tl.constexpr,
    KEEP: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A program has some channels of TOKENS tokens of a sequence. With KEEP it writes the state, which no other one then reads."""
    s, channel = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < SIZE
    begin, count, started, takes = _tokens(query_start, context_lens, taken, s)
    if tl.load(slots + begin) >= 0:
        rows = x + begin.to(tl.int64) * x_stride
        if CONVOLVE:
            t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
            sums = tl.zeros([TOKENS, CHANNELS], tl.float32)
            if BIAS:
                sums += tl.load(bias + channel, mask=inside, other=0.0)[None, :]
            for j in tl.static_range(TAPS):
                i = t + 1 - TAPS + j
                here = ((t < count) & (i >= 0))[:, None] & inside[None, :]
                there = ((t < count) & (i < 0) & started)[:, None] & inside[None, :]
                new = tl.load(rows + i.to(tl.int64)[:, None] * x_stride + channel[None, :], mask=here, other=0.0).to(tl.float32)
                kept = _row(
                    storage, block_stride, tables, s, width, FIRST + tl.minimum(i + TAPS - 1, TAPS - 2), SIZE, COLUMN, PER_BLOCK
                )
                old = tl.load(kept[:, None] + channel[None, :], mask=there, other=0.0)
                sums += (new + old) * tl.load(weight + j * SIZE + channel, mask=inside, other=0.0)[None, :]
            if SILU:
                sums = sums / (1.0 + tl.exp(-sums))
            to = out + (begin + t).to(tl.int64)[:, None] * SIZE + channel[None, :]
            tl.store(to, sums.to(x.dtype.element_ty), mask=(t < count)[:, None] & inside[None, :])
        if CONVOLVE and KEEP:
            # Other threads may still read what is written now.
            tl.debug_barrier()
        if KEEP:
            for r in tl.static_range(TAPS - 1):
                i = count + 1 - TAPS + r
                new = tl.load(rows + i.to(tl.int64) * x_stride + channel, mask=inside & (i >= 0), other=0.0).to(tl.float32)
                later = FIRST + tl.minimum(i + TAPS - 1, TAPS - 2)
                kept = _row(storage, block_stride, tables, s, width, later, SIZE, COLUMN, PER_BLOCK)
                old = tl.load(kept + channel, mask=inside & (i < 0) & started, other=0.0)
                to = _row(storage, block_stride, tables, s, width, FIRST + r, SIZE, COLUMN, PER_BLOCK)
                tl.store(to + channel, new + old, mask=inside & takes)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: StateRows, meta: AttentionMetadata, *, silu: bool
) -> Tensor:
    """Convolves x [T, C] with weight [K, C] fp32 -> [T, C]. One launch for decodes; two for longer sequences."""
    tokens, channels = x.shape
    taps = len(weight)
    assert x.dtype in DTYPES and x.stride(1) == 1 and weight.shape == (taps, channels) and weight.is_contiguous()
    assert weight.dtype == torch.float32 and state.rows == taps - 1 and state.shape == (channels,)
    # Rows that only fill the step up are read later: what lies in memory might be no number.
    out = torch.zeros(tokens, channels, dtype=x.dtype, device=x.device)
    each = 1 if meta.max_query_len == 1 else TOKENS
    pieces = triton.cdiv(meta.max_query_len, each)
    for convolve, keep in ((True, True),) if pieces == 1 else ((True, False), (False, True)):
        _short_convolution[(len(meta.block_tables), triton.cdiv(channels, CHANNELS), pieces if convolve else 1)](
            x,
            x.stride(0),
            weight,
            weight if bias is None else bias,
            out,
            *_state_and_step(state, meta),
            SIZE=channels,
            TAPS=taps,
            SILU=silu,
            BIAS=bias is not None,
            COLUMN=state.column,
            PER_BLOCK=state.per_block,
            FIRST=state.first,
            CONVOLVE=convolve,
            KEEP=keep,
            TOKENS=each,
            CHANNELS=CHANNELS,
        )
    return out


@triton.jit
def _unit(x, mask):
    """Loads a vector, of length 1."""
    wide = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    return wide / tl.sqrt(tl.sum(wide * wide) + 1e-6)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), whose sum rounds where exp(x) is small; the quotient makes up for it."""
    raised = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + raised
    lost = tl.where(total == 1.0, 1.0, raised / tl.where(total == 1.0, 1.0, total - 1.0))
    return tl.where(x > 20.0, x, tl.where(total == 1.0, raised, tl.log(total) * lost))


@triton.jit
def _place(HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns a program's sequence, head and block of columns. A grid has 65,535 programs at most on all axes but the first."""
    blocks: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    of_head = tl.program_id(0) // blocks
    return of_head // HEADS, of_head % HEADS, tl.program_id(0) % blocks


@triton.jit(do_not_specialize=["width", "block_stride"], do_not_specialize_on_alignment=["slots"])
def _gated_delta_rule(
    q,
    k,
    v,
    a,
    b,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    a_log,
    dt_bias,
    out,
    storage,
    block_stride,
    tables,
    width,
    slots,
    query_start,
    context_lens,
    taken,
    scale,
    rate_scale,
    HEADS: tl.constexpr,
    SHARED_BY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_DECAYS: tl.constexpr,
):
    """A program runs COLUMNS columns of a head's state through a sequence's tokens. ROWS is the power of two that holds KEY_DIM.

    With ROW_DECAYS each row of the state has a decay of its own.
    """
    s, head, block = _place(HEADS, VALUE_DIM, COLUMNS)
    row, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, inside = row < KEY_DIM, column < VALUE_DIM
    both_inside = row_inside[:, None] & inside[None, :]
    begin, count, started, takes = _tokens(query_start, context_lens, taken, s)
    if tl.load(slots + begin) >= 0:
        base = _row(storage, block_stride, tables, s, width, FIRST + head, KEY_DIM * VALUE_DIM, COLUMN, PER_BLOCK)
        at = base + row[:, None] * VALUE_DIM + column[None, :]
        memory = tl.load(at, mask=both_inside & started, other=0.0)
        forgetting = tl.exp(tl.load(a_log + head))
        if ROW_DECAYS:
            shift = tl.load(dt_bias + head * KEY_DIM + row, mask=row_inside, other=0.0)
        else:
            shift = tl.load(dt_bias + head)
        for t in range(count):
            token = begin.to(tl.int64) + t
            keys = head // SHARED_BY * KEY_DIM + row
            query, key = _unit(q + token * q_stride + keys, row_inside) * scale, _unit(k + token * k_stride + keys, row_inside)
            values = tl.load(v + token * v_stride + head * VALUE_DIM + column, mask=inside, other=0.0).to(tl.float32)
            opened = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
            rate = opened.to(b.dtype.element_ty).to(tl.float32) * rate_scale
            if ROW_DECAYS:
                gate = tl.load(a + token * a_stride + head * KEY_DIM + row, mask=row_inside, other=0.0).to(tl.float32)
                memory *= tl.exp(-forgetting * _softplus(gate + shift))[:, None]
            else:
                memory *= tl.exp(-forgetting * _softplus(tl.load(a + token * a_stride + head).to(tl.float32) + shift))
            change = (values - tl.sum(memory * key[:, None], axis=0)) * rate
            memory += key[:, None] * change[None, :]
            result = tl.sum(memory * query[:, None], axis=0).to(out.dtype.element_ty)
            tl.store(out + (token * HEADS + head) * VALUE_DIM + column, result, mask=inside)
        tl.store(at, memory, mask=both_inside & takes)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: StateRows,
    meta: AttentionMetadata,
    *,
    rate_scale: float = 1.0,
) -> Tensor:
    """Runs the rule on q, k [T, Hk, Dk] and v [T, Hv, Dv] -> [T, Hv, Dv]. A decode reads and writes the state once."""
    tokens, key_heads, key_dim = k.shape
    _, value_heads, value_dim = v.shape
    assert q.shape == k.shape and value_heads % key_heads == 0 and state.shape == (key_dim, value_dim)
    assert state.rows == value_heads and b.shape == (tokens, value_heads)
    assert a.shape == (*b.shape, key_dim)[: a.dim()] and dt_bias.shape == a.shape[1:]
    assert q.dtype in DTYPES and all(_has_whole_rows(each) for each in (q, k, v, a, b))
    assert a_log.dtype == dt_bias.dtype == torch.float32 and a_log.is_contiguous() and dt_bias.is_contiguous()
    out = torch.zeros(tokens, value_heads, value_dim, dtype=v.dtype, device=v.device)
    _gated_delta_rule[(triton.cdiv(value_dim, COLUMNS) * len(meta.block_tables) * value_heads,)](
        q,
        k,
        v,
        a,
        b,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        a_log,
        dt_bias,
        out,
        *_state_and_step(state, meta),
        key_dim**-0.5,
        rate_scale,
        HEADS=value_heads,
        SHARED_BY=value_heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        COLUMN=state.column,
        PER_BLOCK=state.per_block,
        FIRST=state.first,
        ROWS=triton.next_power_of_2(key_dim),
        COLUMNS=COLUMNS,
        ROW_DECAYS=a.dim() == 3,
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["width", "block_stride"], do_not_specialize_on_alignment=["slots"])
def _ssd_scan(
    x,
    b,
    c,
    dt,
    x_stride,
    b_stride,
    c_stride,
    dt_stride,
    a_log,
    skip,
    dt_bias,
    out,
    storage,
    block_stride,
    tables,
    width,
    slots,
    query_start,
    context_lens,
    taken,
    dt_low,
    dt_high,
    HEADS: tl.constexpr,
    SHARED_BY: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program runs COLUMNS columns of a head's state through a sequence's tokens. ROWS is the power of two from STATE_SIZE on."""
    s, head, block = _place(HEADS, DIM, COLUMNS)
    row, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, inside = row < STATE_SIZE, column < DIM
    both_inside = row_inside[:, None] & inside[None, :]
    begin, count, started, takes = _tokens(query_start, context_lens, taken, s)
    if tl.load(slots + begin) >= 0:
        base = _row(storage, block_stride, tables, s, width, FIRST + head, STATE_SIZE * DIM, COLUMN, PER_BLOCK)
        at = base + row[:, None] * DIM + column[None, :]
        memory = tl.load(at, mask=both_inside & started, other=0.0)
        forgetting, shift, added = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(skip + head)
        for t in range(count):
            token = begin.to(tl.int64) + t
            rows = head // SHARED_BY * STATE_SIZE + row
            key = tl.load(b + token * b_stride + rows, mask=row_inside, other=0.0).to(tl.float32)
            query = tl.load(c + token * c_stride + rows, mask=row_inside, other=0.0).to(tl.float32)
            values = tl.load(x + token * x_stride + head * DIM + column, mask=inside, other=0.0).to(tl.float32)
            raw = _softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + shift)
            step_size = tl.minimum(tl.maximum(raw, dt_low), dt_high)
            memory = memory * tl.exp(-forgetting * step_size) + key[:, None] * (values * step_size)[None, :]
            result = tl.sum(memory * query[:, None], axis=0) + values * added
            tl.store(out + (token * HEADS + head) * DIM + column, result.to(out.dtype.element_ty), mask=inside)
        tl.store(at, memory, mask=both_inside & takes)


def ssd_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: StateRows,
    meta: AttentionMetadata,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Runs the scan on x [T, H, P] and b, c [T, G, N] -> [T, H, P]. A decode reads and writes the state once."""
    tokens, heads, dim = x.shape
    _, groups, size = b.shape
    assert b.shape == c.shape and heads % groups == 0 and state.shape == (size, dim)
    assert state.rows == heads and dt.shape == (tokens, heads)
    assert x.dtype in DTYPES and all(_has_whole_rows(each) for each in (x, b, c, dt))
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in (a_log, skip, dt_bias))
    out = torch.zeros(tokens, heads, dim, dtype=x.dtype, device=x.device)
    _ssd_scan[(triton.cdiv(dim, COLUMNS) * len(meta.block_tables) * heads,)](
        x,
        b,
        c,
        dt,
        x.stride(0),
        b.stride(0),
        c.stride(0),
        dt.stride(0),
        a_log,
        skip,
        dt_bias,
        out,
        *_state_and_step(state, meta),
        *dt_limits,
        HEADS=heads,
        SHARED_BY=heads // groups,
        STATE_SIZE=size,
        DIM=dim,
        COLUMN=state.column,
        PER_BLOCK=state.per_block,
        FIRST=state.first,
        ROWS=triton.next_power_of_2(size),
        COLUMNS=COLUMNS,
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["width", "block_stride"], do_not_specialize_on_alignment=["slots"])
def _selective_scan(
    x,
    gate,
    dt,
    b,
    c,
    x_stride,
    gate_stride,
    dt_stride,
    b_stride,
    c_stride,
    rates,
    skip,
    dt_bias,
    out,
    storage,
    block_stride,
    tables,
    width,
    slots,
    query_start,
    context_lens,
    taken,
    SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    COLUMN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program runs COLUMNS channels through a sequence's tokens. ROWS is the power of two from STATE_SIZE on."""
    s, _, block = _place(1, SIZE, COLUMNS)
    row, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, inside = row < STATE_SIZE, column < SIZE
    both_inside = row_inside[:, None] & inside[None, :]
    begin, count, started, takes = _tokens(query_start, context_lens, taken, s)
    if tl.load(slots + begin) >= 0:
        number = FIRST + tl.minimum(row, STATE_SIZE - 1)
        at = _row(storage, block_stride, tables, s, width, number, SIZE, COLUMN, PER_BLOCK)[:, None] + column[None, :]
        memory = tl.load(at, mask=both_inside & started, other=0.0)
        rate = tl.load(rates + row[:, None] * SIZE + column[None, :], mask=both_inside, other=0.0)
        shift = tl.load(dt_bias + column, mask=inside, other=0.0)
        added = tl.load(skip + column, mask=inside, other=0.0)
        for t in range(count):
            token = begin.to(tl.int64) + t
            key = tl.load(b + token * b_stride + row, mask=row_inside, other=0.0).to(tl.float32)
            query = tl.load(c + token * c_stride + row, mask=row_inside, other=0.0).to(tl.float32)
            values = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            opening = tl.load(gate + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
            step_size = _softplus(tl.load(dt + token * dt_stride + column, mask=inside, other=0.0).to(tl.float32) + shift)
            memory = memory * tl.exp(-rate * step_size[None, :]) + key[:, None] * (values * step_size)[None, :]
            result = (tl.sum(memory * query[:, None], axis=0) + values * added) * opening / (1.0 + tl.exp(-opening))
            tl.store(out + token * SIZE + column, result.to(out.dtype.element_ty), mask=inside)
        tl.store(at, memory, mask=both_inside & takes)


def selective_scan(
    x: Tensor,
    gate: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rates: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: StateRows,
    meta: AttentionMetadata,
) -> Tensor:
    """Runs the scan on x, gate, dt [T, C] and b, c [T, N] -> [T, C]. A decode reads and writes the state once."""
    tokens, channels = x.shape
    size = b.shape[1]
    assert gate.shape == dt.shape == x.shape and b.shape == c.shape == (tokens, size)
    assert state.rows == size and state.shape == (channels,) and rates.shape == (size, channels)
    assert x.dtype in DTYPES and all(_has_whole_rows(each) for each in (x, gate, dt, b, c))
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in (rates, skip, dt_bias))
    out = torch.zeros(tokens, channels, dtype=x.dtype, device=x.device)
    _selective_scan[(triton.cdiv(channels, SCAN_CHANNELS) * len(meta.block_tables),)](
        x,
        gate,
        dt,
        b,
        c,
        x.stride(0),
        gate.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        rates,
        skip,
        dt_bias,
        out,
        *_state_and_step(state, meta),
        SIZE=channels,
        STATE_SIZE=size,
        COLUMN=state.column,
        PER_BLOCK=state.per_block,
        FIRST=state.first,
        ROWS=triton.next_power_of_2(size),
        COLUMNS=SCAN_CHANNELS,
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm(
    x,
    x_stride,
    gate,
    gate_stride,
    weight,
    eps,
    out,
    rows,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    OF_HEADS: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """A program has ROWS heads, of whichever tokens. With OF_HEADS each head has weights of its own."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < SIZE)[None, :]
    token, within = (row // HEADS).to(tl.int64)[:, None], (row % HEADS)[:, None] * SIZE + column[None, :]
    wide = tl.load(x + token * x_stride + within, mask=here, other=0.0).to(tl.float32)
    opening = tl.load(gate + token * gate_stride + within, mask=here, other=0.0).to(tl.float32)
    opening = (1.0 if SIGMOID else opening) / (1.0 + tl.exp(-opening))
    if GATE_FIRST:
        wide *= opening
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=1) / SIZE + eps))
    if OF_HEADS:
        weights = tl.load(weight + within, mask=here, other=0.0).to(tl.float32)
    else:
        weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    if SIGMOID:
        opened = wide * scale[:, None] * weights * opening
    else:
        normal = (wide * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
        opened = (normal * weights).to(weight.dtype.element_ty).to(tl.float32)
        if not GATE_FIRST:
            opened *= opening
    tl.store(out + row.to(tl.int64)[:, None] * SIZE + column[None, :], opened.to(x.dtype.element_ty), mask=here)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """Normalises heads x [T, H, D] and opens them by the gate [T, H, D]. Moves 3 T H D elements."""
    tokens, heads, size = x.shape
    assert x.dtype in DTYPES and gate.shape == x.shape and _has_whole_rows(x) and _has_whole_rows(gate)
    assert weight.shape in ((size,), (heads, size)) and weight.is_contiguous()
    out = torch.empty(tokens, heads, size, dtype=x.dtype, device=x.device)
    block, rows_each, warps = row_shape(size)
    _gated_rms_norm[(triton.cdiv(tokens * heads, rows_each),)](
        x,
        x.stride(0),
        gate,
        gate.stride(0),
        weight,
        eps,
        out,
        tokens * heads,
        HEADS=heads,
        SIZE=size,
        ROWS=rows_each,
        BLOCK=block,
        GATE_FIRST=gate_first,
        OF_HEADS=weight.dim() == 2,
        SIGMOID=sigmoid,
        num_warps=warps,
    )
    return out


def _has_whole_rows(x: Tensor) -> bool:
    """Returns whether each token's elements lie in one piece."""
    strides = x.stride()
    return strides[-1] == 1 and (x.dim() < 3 or strides[1] == x.shape[2])


def _state_and_step(state: StateRows, meta: AttentionMetadata) -> tuple[Tensor | int, ...]:
    """Returns the kernels' arguments from `storage` to `taken`. Slots begin anywhere: behind those of the KV groups."""
    storage, tables = state.storage, meta.block_tables
    assert storage.dtype == torch.float32 and storage.stride(1) == 1 and tables.stride(1) == 1
    return (
        storage,
        storage.stride(0),
        tables,
        tables.stride(0),
        meta.slot_mapping,
        meta.query_start,
        meta.context_lens,
        meta.query_start.diff() if meta.taken is None else meta.taken,
    )
