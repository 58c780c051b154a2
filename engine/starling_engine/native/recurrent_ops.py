"""The native kernels of recurrent layers. `layers.recurrent.RecurrentKernels` says what they compute."""

import math
from typing import Protocol

import torch
from torch import Tensor

from starling_engine.native.bindings import library


class Rows(Protocol):
    """Rows of a state in the blocks of the pool (`kernels.recurrent_state.StateRows`)."""

    @property
    def storage(self) -> Tensor: ...
    @property
    def column(self) -> int: ...
    @property
    def per_block(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Step(Protocol):
    """A step's sequences (`kernels.attention_metadata.AttentionMetadata`)."""

    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    taken: Tensor | None


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, state: Rows, meta: Step, *, silu: bool) -> Tensor:
    """Convolves x [T, C] with weight [K, C] -> [T, C]. bf16 or fp32."""
    tokens, channels = x.shape
    taps = weight.shape[0]
    assert x.stride(1) == 1 and weight.shape == (taps, channels)
    assert state.rows == taps - 1 and state.shape == (channels,)
    out = torch.empty(tokens, channels, dtype=x.dtype)
    library().starling_short_convolution(
        x.data_ptr(),
        x.stride(0),
        _address(weight, channels),
        None if bias is None else _address(bias, channels),
        channels,
        taps,
        silu,
        out.data_ptr(),
        *_state_and_step(state, meta, tokens),
        _is_fp32(x),
        torch.get_num_threads(),
    )
    return out


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Rows,
    meta: Step,
    *,
    rate_scale: float = 1.0,
) -> Tensor:
    """Runs the rule on q, k [T, Hk, Dk] and v [T, Hv, Dv] -> [T, Hv, Dv]. bf16 or fp32; Dk, Dv multiples of 16 are faster."""
    tokens, key_heads, key_dim = k.shape
    _, value_heads, value_dim = v.shape
    assert q.shape == k.shape and value_heads % key_heads == 0 and state.shape == (key_dim, value_dim)
    assert state.rows == value_heads and b.shape == (tokens, value_heads)
    assert a.shape == (*b.shape, key_dim)[: a.dim()] and dt_bias.shape == a.shape[1:]
    assert q.dtype == k.dtype == v.dtype == a.dtype == b.dtype and all(_has_whole_rows(each) for each in (q, k, v, a, b))
    out = torch.empty(tokens, value_heads, value_dim, dtype=v.dtype)
    library().starling_gated_delta_rule(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        _address(a_log, value_heads),
        _address(dt_bias, a.shape[-1]),
        rate_scale,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        a.dim() == 3,
        out.data_ptr(),
        *_state_and_step(state, meta, tokens),
        _is_fp32(v),
        torch.get_num_threads(),
    )
    return out


def ssd_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    a_log: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: Rows,
    meta: Step,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Runs the scan on x [T, H, P] and b, c [T, G, N] -> [T, H, P]. bf16 or fp32; P and N that are multiples of 16 are faster."""
    tokens, heads, dim = x.shape
    _, groups, size = b.shape
    assert b.shape == c.shape and heads % groups == 0 and dt.shape == (tokens, heads)
    assert state.rows == heads and state.shape == (size, dim)
    assert x.dtype == b.dtype == c.dtype == dt.dtype and all(_has_whole_rows(each) for each in (x, b, c, dt))
    out = torch.empty(tokens, heads, dim, dtype=x.dtype)
    library().starling_ssd_scan(
        x.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
        dt.data_ptr(),
        x.stride(0),
        b.stride(0),
        c.stride(0),
        dt.stride(0),
        _address(a_log, heads),
        _address(skip, heads),
        _address(dt_bias, heads),
        *dt_limits,
        heads,
        groups,
        dim,
        size,
        out.data_ptr(),
        *_state_and_step(state, meta, tokens),
        _is_fp32(x),
        torch.get_num_threads(),
    )
    return out


def selective_scan(
    x: Tensor,
    gate: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rates: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: Rows,
    meta: Step,
) -> Tensor:
    """Runs the selective scan on x, gate, dt [T, C] and b, c [T, N] -> [T, C]. bf16 or fp32; C of a multiple of 16 is faster."""
    tokens, channels = x.shape
    size = b.shape[1]
    assert gate.shape == dt.shape == x.shape and b.shape == c.shape == (tokens, size)
    assert state.rows == size and state.shape == (channels,) and rates.shape == (size, channels)
    assert all(each.dtype == x.dtype and _has_whole_rows(each) for each in (gate, dt, b, c)) and _has_whole_rows(x)
    out = torch.empty(tokens, channels, dtype=x.dtype)
    library().starling_selective_scan(
        x.data_ptr(),
        gate.data_ptr(),
        dt.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
        x.stride(0),
        gate.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        _address(rates, channels),
        _address(skip, channels),
        _address(dt_bias, channels),
        channels,
        size,
        out.data_ptr(),
        *_state_and_step(state, meta, tokens),
        _is_fp32(x),
        torch.get_num_threads(),
    )
    return out


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """Normalises heads x [T, H, D] and opens them by the gate [T, H, D]. fp32 or bf16; the weight is that, or fp32."""
    tokens, heads, dim = x.shape
    assert gate.shape == x.shape and gate.dtype == x.dtype and _has_whole_rows(x) and _has_whole_rows(gate)
    assert weight.shape in ((dim,), (heads, dim)) and weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)
    out = torch.empty(tokens, heads, dim, dtype=x.dtype)
    library().starling_gated_rms_norm(
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        weight.data_ptr(),
        dim if weight.dim() == 2 else 0,
        eps,
        out.data_ptr(),
        tokens,
        heads,
        dim,
        gate_first,
        _is_fp32(x),
        weight.dtype is torch.float32,
        sigmoid,
        torch.get_num_threads(),
    )
    return out


def _is_fp32(x: Tensor) -> bool:
    assert x.dtype in (torch.float32, torch.bfloat16)
    return x.dtype is torch.float32


def _has_whole_rows(x: Tensor) -> bool:
    """Returns whether each token's elements lie in one piece."""
    strides = x.stride()
    return strides[-1] == 1 and (x.dim() < 3 or strides[1] == x.shape[2])


def _address(weight: Tensor, size: int) -> int:
    assert weight.dtype == torch.float32 and weight.shape[-1] == size and weight.is_contiguous()
    return weight.data_ptr()


def _state_and_step(state: Rows, meta: Step, tokens: int) -> tuple[int | None, ...]:
    """Returns the arguments of `StateRows` and `StepSequences` in the kernels."""
    storage, tables = state.storage, meta.block_tables
    assert storage.dtype == torch.float32 and storage.stride(1) == 1
    assert meta.slot_mapping.dtype == torch.int64 and meta.slot_mapping.shape == (tokens,)
    assert tables.dtype == meta.query_start.dtype == meta.context_lens.dtype == torch.int32 and tables.stride(1) == 1
    assert tables.shape[1] >= state.column + -(-(state.first + state.rows) // state.per_block)
    return (
        storage.data_ptr(),
        storage.stride(0),
        tables.data_ptr(),
        tables.stride(0),
        state.column,
        state.per_block,
        state.first,
        meta.slot_mapping.data_ptr(),
        meta.query_start.data_ptr(),
        meta.context_lens.data_ptr(),
        None if meta.taken is None else _taken(meta.taken),
        tables.shape[0],
    )


def _taken(taken: Tensor) -> int:
    assert taken.dtype == torch.int32 and taken.is_contiguous()
    return taken.data_ptr()
