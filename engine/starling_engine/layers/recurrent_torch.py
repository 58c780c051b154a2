"""Defines the kernels of recurrent layers in plain torch, one sequence after the other. Runs on any device."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import StateRows

LENGTH_EPS = 1e-6


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: StateRows, meta: AttentionMetadata, *, silu: bool
) -> Tensor:
    """Convolves each channel causally; see `RecurrentKernels`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, table, is_first, takes in _sequences(meta):
        inputs = torch.cat((_begin(state, table, is_first=is_first), x[tokens].float()))
        sums = F.conv1d(inputs.T, weight.T[:, None], bias, groups=len(weight.T)).T
        out[tokens] = F.silu(sums) if silu else sums
        if takes:
            state.write(table, inputs[len(inputs) - state.rows :][None])
    return out


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
    """Runs the gated delta rule; see `RecurrentKernels`."""
    shared_by = v.shape[1] // k.shape[1]
    queries, keys = (_unit(each.float()).repeat_interleave(shared_by, dim=1)[..., None] for each in (q, k))
    queries = queries * q.shape[2] ** -0.5
    shifted = (a.float() + dt_bias).view(*v.shape[:2], -1)
    decay = torch.exp(-a_log.exp()[:, None] * F.softplus(shifted))[..., None]
    rate = b.sigmoid().float()[..., None] * rate_scale
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for tokens, table, is_first, takes in _sequences(meta):
        memory = _begin(state, table, is_first=is_first)
        for t in range(tokens.start, tokens.stop):
            memory = memory * decay[t]
            recalled = (memory * keys[t]).sum(dim=1)
            memory = memory + keys[t] * (rate[t] * (v[t].float() - recalled))[:, None]
            out[t] = (memory * queries[t]).sum(dim=1)
        if takes:
            state.write(table, memory[None])
    return out


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
    """Runs the scan of a state-space layer; see `RecurrentKernels`."""
    keys, queries = (each.float().repeat_interleave(x.shape[1] // b.shape[1], dim=1)[..., None] for each in (b, c))
    step_size = F.softplus(dt.float() + dt_bias).clamp(*dt_limits)[..., None]
    decay = torch.exp(-a_log.exp()[:, None] * step_size)[..., None]
    values = (x.float() * step_size)[:, :, None]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, table, is_first, takes in _sequences(meta):
        memory = _begin(state, table, is_first=is_first)
        for t in range(tokens.start, tokens.stop):
            memory = memory * decay[t] + keys[t] * values[t]
            out[t] = (memory * queries[t]).sum(dim=1) + skip[:, None] * x[t].float()
        if takes:
            state.write(table, memory[None])
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
    state: StateRows,
    meta: AttentionMetadata,
) -> Tensor:
    """Runs the selective scan of Mamba; see `RecurrentKernels`."""
    keys, queries = b.float()[..., None], c.float()[..., None]
    step_size = F.softplus(dt.float() + dt_bias)
    values, added, opened = x.float() * step_size, x.float() * skip, F.silu(gate.float())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, table, is_first, takes in _sequences(meta):
        memory = _begin(state, table, is_first=is_first)
        for t in range(tokens.start, tokens.stop):
            memory = memory * torch.exp(-rates * step_size[t]) + keys[t] * values[t]
            out[t] = ((memory * queries[t]).sum(dim=0) + added[t]) * opened[t]
        if takes:
            state.write(table, memory[None])
    return out


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """Normalises heads and opens them by the gate; see `RecurrentKernels`."""
    opened = gate.float().sigmoid() if sigmoid else F.silu(gate.float())
    wide = x.float() * opened if gate_first else x.float()
    normal = F.rms_norm(wide, wide.shape[-1:], eps=eps)
    if sigmoid:
        return (weight.float() * normal * opened).to(x.dtype)
    normal = weight * normal.to(x.dtype)
    return (normal if gate_first else normal * opened).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)


def _begin(state: StateRows, table: Tensor, *, is_first: bool) -> Tensor:
    """Returns the state [rows, *shape] before the step. With `is_first` there is none."""
    return torch.zeros(state.rows, *state.shape, device=table.device) if is_first else state.read(table)[0]


def _sequences(meta: AttentionMetadata) -> Iterator[tuple[slice, Tensor, bool, bool]]:
    """Yields each sequence's tokens to compute, and its block table [1, width].

    Then whether the step has its first token, and whether its state takes these tokens in.
    """
    starts, lengths = meta.host_lens or (meta.query_start.tolist(), meta.context_lens.tolist())
    slots = meta.slot_mapping[meta.query_start[:-1].long()].tolist()
    taken = itertools.repeat(None) if meta.taken is None else meta.taken.tolist()
    for s, (slot, length, first) in enumerate(zip(slots, lengths, taken, strict=False)):
        if slot >= 0:
            count = starts[s + 1] - starts[s]
            yield slice(starts[s], starts[s] + (first or count)), meta.block_tables[s : s + 1], length == count, first != 0
