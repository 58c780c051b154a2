"""Steps of recurrent layers, whose kernels are compared with the functions of transformers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import StateRows
from starling_engine.layers.recurrent import RecurrentKernels
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated, mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated, recurrent_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    causal_conv1d_update,
    torch_recurrent_gated_delta_rule,
)

BF16, FP32 = torch.bfloat16, torch.float32
MIXED = ([5, 1, 2, 9, 1, 3], [0, 7, 4, 0, 0, 1])
"""Tokens of sequences in the step, and before it: prompts, their continuations, decodes."""


@dataclass
class Blocks:
    """A pool whose blocks have the rows of three layers; in all that is not the second layer's it has NaN."""

    storage: Tensor
    state: StateRows
    meta: AttentionMetadata

    @classmethod
    def of(cls, rows: int, shape: tuple[int, ...], lengths: list[int], before: list[int], device: torch.device) -> "Blocks":
        """Begins with a random state for sequences with tokens before the step, and with rubbish for others.

        A last sequence only fills the step up.
        """
        per_block, column, sequences = 3, 1, len(lengths) + 1
        width = column + -(-3 * rows // per_block)
        size = per_block * math.prod(shape) + 5
        slabs = torch.full((2 * sequences * width, size + 11), torch.nan, device=device)
        starts = torch.tensor([0, *lengths, 1]).cumsum(0).int()
        slots = torch.arange(sum(lengths) + 1)
        slots[-1] = -1
        meta = AttentionMetadata(
            positions=torch.cat([torch.arange(b, b + n) for b, n in zip([*before, 0], [*lengths, 1], strict=True)]).to(device),
            slot_mapping=slots.to(device),
            query_start=starts.to(device),
            context_lens=torch.tensor([b + n for b, n in zip([*before, 0], [*lengths, 1], strict=True)]).int().to(device),
            block_tables=torch.randperm(len(slabs))[: sequences * width].view(sequences, width).int().to(device),
            max_query_len=max(lengths),
        )
        state = StateRows(slabs[:, :size], column, per_block, rows, rows, shape)
        blocks = cls(slabs, state, meta)
        for s, n in enumerate(before):
            if n:
                state.write(meta.block_tables[s : s + 1], torch.randn(1, rows, *shape, device=device))
        return blocks

    def sequences(self) -> list[tuple[slice, Tensor, bool]]:
        """Returns the tokens of each real sequence, its block table, and whether it begins in the step."""
        starts = self.meta.query_start.tolist()
        first = [n == ends - at for n, at, ends in zip(self.meta.context_lens.tolist(), starts, starts[1:], strict=False)]
        tables = self.meta.block_tables
        return [(slice(*starts[s : s + 2]), tables[s : s + 1], first[s]) for s in range(len(tables) - 1)]

    def begin(self, table: Tensor, is_first: bool) -> Tensor:
        """Returns the state [rows, *shape] with which a sequence begins the step."""
        before = self.state.read(table)[0]
        return torch.zeros_like(before) if is_first else before

    def compare(self, before: Tensor, expected: list[Tensor], tolerance: float) -> None:
        """Compares the sequences' states after the step, and that nothing else was written since the pool was `before`."""
        for (_, table, _), each in zip(self.sequences(), expected, strict=True):
            assert_near(self.state.read(table)[0], each, tolerance)
        real = self.meta.block_tables[:-1]
        self.state.write(real, torch.zeros(len(real), self.state.rows, *self.state.shape, device=real.device))
        after = self.storage.clone()
        self.storage.copy_(before)
        self.state.write(real, torch.zeros(len(real), self.state.rows, *self.state.shape, device=real.device))
        assert torch.equal(after.nan_to_num(nan=7.0), self.storage.nan_to_num(nan=7.0))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compares with `tolerance` relative to the largest magnitude. In bf16 a rounding is 2^-8 of each element."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, atol=tolerance * largest, rtol=2**-7 if actual.dtype == BF16 else 0.0)


def strided(tokens: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Makes random rows [tokens, *shape] that are the middle of wider ones; the rest is NaN."""
    size = math.prod(shape)
    wide = torch.full((tokens, size + 16), torch.nan, device=device, dtype=dtype)
    wide[:, 8 : 8 + size] = torch.randn(tokens, size).to(device, dtype)
    return wide[:, 8 : 8 + size].unflatten(1, shape)


def check_short_convolution(
    kernels: RecurrentKernels,
    device: torch.device,
    *,
    channels: int,
    taps: int,
    dtype: torch.dtype = BF16,
    bias: bool = False,
    silu: bool = True,
    lengths: tuple[list[int], list[int]] = MIXED,
) -> None:
    """Compares a mixed step with `causal_conv1d_update`, which has a state of zeros where a sequence begins."""
    blocks = Blocks.of(taps - 1, (channels,), *lengths, device)
    x = strided(len(blocks.meta.positions), channels, dtype=dtype, device=device)
    weight, added = torch.randn(taps, channels, device=device), torch.randn(channels, device=device) if bias else None
    outs, states = [], []
    for tokens, table, is_first in blocks.sequences():
        state = blocks.begin(table, is_first).T[None].contiguous()
        out = causal_conv1d_update(x[tokens].float().T[None], state, weight.T, added, "silu" if silu else None)
        outs.append(out[0].T.to(dtype))
        states.append(state[0].T)
    before = blocks.storage.clone()
    actual = kernels.short_convolution(x, weight, added, blocks.state, blocks.meta, silu=silu)
    assert_near(actual[:-1], torch.cat(outs), 1e-5)
    blocks.compare(before, states, 0)


@dataclass
class DeltaInputs:
    """Inputs of the gated delta rule, with queries, keys and values in one tensor; `row_decays` for one of each row."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    rate_scale: float = 1.0

    @classmethod
    def of(
        cls,
        tokens: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_decays: bool = False,
    ) -> "DeltaInputs":
        keys, values = heads[0] * dims[0], heads[1] * dims[1]
        q, k, v = strided(tokens, 2 * keys + values, dtype=dtype, device=device).split([keys, keys, values], dim=1)
        # Heads that forget slowly, and heads that forget all at once.
        decays = torch.linspace(-4, 5, heads[1], device=device)
        gates = (heads[1], dims[0]) if row_decays else (heads[1],)
        return cls(
            q.unflatten(1, (heads[0], -1)),
            k.unflatten(1, (heads[0], -1)),
            v.unflatten(1, (heads[1], -1)),
            strided(tokens, *gates, dtype=dtype, device=device),
            strided(tokens, heads[1], dtype=dtype, device=device),
            decays,
            torch.randn(gates, device=device),
        )

    def run(self, kernels: RecurrentKernels, blocks: Blocks) -> Tensor:
        """Runs the kernel on all of them."""
        inputs = (self.q, self.k, self.v, self.a, self.b, self.a_log, self.dt_bias)
        return kernels.gated_delta_rule(*inputs, blocks.state, blocks.meta, rate_scale=self.rate_scale)

    def of_rank(self, rank: int, count: int) -> "DeltaInputs":
        """Returns the part of one of `count` ranks, which have some heads each."""
        whole = (self.q, self.k, self.v, self.a, self.b)
        return DeltaInputs(
            *(each.chunk(count, dim=1)[rank] for each in whole), *(each.chunk(count)[rank] for each in (self.a_log, self.dt_bias))
        )


def check_gated_delta_rule(
    kernels: RecurrentKernels,
    device: torch.device,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = BF16,
    lengths: tuple[list[int], list[int]] = MIXED,
    rate_scale: float = 1.0,
    row_decays: bool = False,
) -> None:
    """Compares a step with `torch_recurrent_gated_delta_rule`, and its gates with those of Qwen3NextGatedDeltaNet.

    OlmoHybridGatedDeltaNet has a `rate_scale` of 2. With `row_decays` it is `recurrent_kimi_delta_attention`.
    """
    blocks = Blocks.of(heads[1], dims, *lengths, device)
    inputs = DeltaInputs.of(len(blocks.meta.positions), heads, dims, dtype, device, row_decays=row_decays)
    inputs.rate_scale = rate_scale
    rate = inputs.a_log.exp()
    decay = -(rate[:, None] if row_decays else rate) * F.softplus(inputs.a.float() + inputs.dt_bias)
    rule = recurrent_kimi_delta_attention if row_decays else torch_recurrent_gated_delta_rule
    q, k = (each.repeat_interleave(heads[1] // heads[0], dim=1) if row_decays else each for each in (inputs.q, inputs.k))
    outs, states = [], []
    for tokens, table, is_first in blocks.sequences():
        out, state = rule(
            *(each[tokens][None].float() for each in (q, k, inputs.v)),
            g=decay[tokens][None],
            beta=inputs.b.sigmoid()[tokens][None] * rate_scale,
            initial_state=blocks.begin(table, is_first)[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outs.append(out[0].to(dtype))
        states.append(state[0])
    before = blocks.storage.clone()
    assert_near(inputs.run(kernels, blocks)[:-1], torch.cat(outs), 1e-5)
    blocks.compare(before, states, 1e-5)


def check_ranks(
    kernels: RecurrentKernels, device: torch.device, *, heads: tuple[int, int], dims: tuple[int, int], row_decays: bool = False
) -> None:
    """Compares two ranks of some heads each with one of all."""
    whole = Blocks.of(heads[1], dims, [4, 1], [3, 2], device)
    inputs = DeltaInputs.of(len(whole.meta.positions), heads, dims, BF16, device, row_decays=row_decays)
    tables, outs, states = whole.meta.block_tables, [], []
    for rank in range(2):
        part = Blocks.of(heads[1] // 2, dims, [4, 1], [3, 2], device)
        part.state.write(part.meta.block_tables, whole.state.read(tables).chunk(2, dim=1)[rank])
        outs.append(inputs.of_rank(rank, 2).run(kernels, part)[:-1])
        states.append(part.state.read(part.meta.block_tables[:-1]))
    assert torch.equal(inputs.run(kernels, whole)[:-1], torch.cat(outs, dim=1))
    assert torch.equal(whole.state.read(tables[:-1]), torch.cat(states, dim=1))


@dataclass
class ScanInputs:
    """Inputs of the scan of a state-space layer, with x, b and c in one tensor."""

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    a_log: Tensor
    skip: Tensor
    dt_bias: Tensor

    @classmethod
    def of(
        cls, tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> "ScanInputs":
        """Makes inputs of heads[0] groups and heads[1] heads, with states of shape `dims`."""
        keys, values = heads[0] * dims[0], heads[1] * dims[1]
        x, b, c = strided(tokens, values + 2 * keys, dtype=dtype, device=device).split([values, keys, keys], dim=1)
        return cls(
            x.unflatten(1, (heads[1], -1)),
            b.unflatten(1, (heads[0], -1)),
            c.unflatten(1, (heads[0], -1)),
            strided(tokens, heads[1], dtype=dtype, device=device),
            torch.linspace(-4, 2, heads[1], device=device),  # heads that forget slowly, and heads that forget all at once
            torch.randn(heads[1], device=device),
            torch.randn(heads[1], device=device),
        )

    def run(self, kernels: RecurrentKernels, blocks: Blocks, dt_limits: tuple[float, float] = (0.0, math.inf)) -> Tensor:
        """Runs the kernel on all of them."""
        inputs = (self.x, self.b, self.c, self.dt, self.a_log, self.skip, self.dt_bias)
        return kernels.ssd_scan(*inputs, blocks.state, blocks.meta, dt_limits=dt_limits)


def check_ssd_scan(
    kernels: RecurrentKernels,
    device: torch.device,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = BF16,
    lengths: tuple[list[int], list[int]] = MIXED,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> None:
    """Compares a step with `mamba2_chunk_scan`, whose states are transposed, and decodes also with its function for these."""
    blocks = Blocks.of(heads[1], dims, *lengths, device)
    inputs = ScanInputs.of(len(blocks.meta.positions), heads, dims, dtype, device)
    rate = -inputs.a_log.exp()
    outs, states = [], []
    for tokens, table, is_first in blocks.sequences():
        x, b, c, dt = (each[tokens][None].float() for each in (inputs.x, inputs.b, inputs.c, inputs.dt))
        begin = blocks.begin(table, is_first).transpose(1, 2)[None].contiguous()
        more = {"D": inputs.skip, "dt_bias": inputs.dt_bias, "dt_softplus": True}
        scan = {"initial_states": begin, "return_final_states": True, "dt_limit": dt_limits, "chunk_size": 4}
        out, state = mamba2_chunk_scan(x, dt, rate, b, c, **more, **scan)
        if x.shape[1] == 1 and dt_limits == (0.0, math.inf):
            wide = [each[:, None].expand(-1, dims[1]) for each in (inputs.skip, inputs.dt_bias)]
            rates, step = rate[:, None, None].expand(-1, *dims[::-1]), dt[0, :, :, None].expand(-1, -1, dims[1])
            again = mamba2_selective_state_update(begin, x[:, 0], step, rates, b[:, 0], c[:, 0], wide[0], wide[1], dt_softplus=True)
            assert_near(again, out[:, 0], 1e-5)
            assert_near(begin, state, 1e-5)
        outs.append(out[0].to(dtype))
        states.append(state[0].transpose(1, 2))
    before = blocks.storage.clone()
    assert_near(inputs.run(kernels, blocks, dt_limits)[:-1], torch.cat(outs), 1e-5)
    blocks.compare(before, states, 1e-5)


@dataclass
class MambaInputs:
    """Inputs of Mamba's scan, with x and its gate in one tensor, and b and c in one."""

    x: Tensor
    gate: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    rates: Tensor
    skip: Tensor
    dt_bias: Tensor

    @classmethod
    def of(cls, tokens: int, channels: int, size: int, dtype: torch.dtype, device: torch.device) -> "MambaInputs":
        """Makes inputs of channels with `size` elements of state each, which forget slowly or all at once."""
        x, gate = strided(tokens, 2 * channels, dtype=dtype, device=device).chunk(2, dim=1)
        b, c = strided(tokens, 2 * size, dtype=dtype, device=device).chunk(2, dim=1)
        rates = torch.linspace(-4, 2, size, device=device).exp()[:, None] * (0.5 + torch.rand(size, channels, device=device))
        dt = 3 * strided(tokens, channels, dtype=dtype, device=device)
        return cls(x, gate, dt, b, c, rates, torch.randn(channels, device=device), torch.randn(channels, device=device))

    def run(self, kernels: RecurrentKernels, blocks: Blocks) -> Tensor:
        """Runs the kernel on all of them."""
        inputs = (self.x, self.gate, self.dt, self.b, self.c, self.rates, self.skip, self.dt_bias)
        return kernels.selective_scan(*inputs, blocks.state, blocks.meta)


def check_selective_scan(
    kernels: RecurrentKernels,
    device: torch.device,
    *,
    channels: int,
    size: int,
    dtype: torch.dtype = BF16,
    lengths: tuple[list[int], list[int]] = MIXED,
) -> None:
    """Compares a step with `mamba_selective_state_update`, token by token, and sequences that begin with `mamba_selective_scan`."""
    blocks = Blocks.of(size, (channels,), *lengths, device)
    inputs = MambaInputs.of(len(blocks.meta.positions), channels, size, dtype, device)
    weights = {"A": -inputs.rates.T, "D": inputs.skip}
    outs, states = [], []
    for tokens, table, is_first in blocks.sequences():
        x, gate, dt, b, c = (each[tokens].float() for each in (inputs.x, inputs.gate, inputs.dt, inputs.b, inputs.c))
        state = blocks.begin(table, is_first).T[None].contiguous()
        decodes = [
            mamba_selective_state_update(state, x, dt, B=b, C=c, z=gate, dt_bias=inputs.dt_bias, dt_softplus=True, **weights)
            for x, gate, dt, b, c in zip(*(each[:, None] for each in (x, gate, dt, b, c)), strict=True)
        ]
        out = torch.cat(decodes)
        if is_first:
            x, gate, dt, b, c = (each.T[None] for each in (x, gate, dt, b, c))
            more = {"delta_bias": inputs.dt_bias, "delta_softplus": True, "return_last_state": True}
            again, last = mamba_selective_scan(x, dt, B=b, C=c, z=gate, **weights, **more)
            assert_near(again[0].T, out, 1e-5)
            assert_near(last, state, 1e-5)
        outs.append(out.to(dtype))
        states.append(state[0].T)
    before = blocks.storage.clone()
    assert_near(inputs.run(kernels, blocks)[:-1], torch.cat(outs), 1e-5)
    blocks.compare(before, states, 1e-5)


LONG_AND_SHORT = ([5, 2, 4, 40, 3], [0, 7, 3, 2, 1], [3, 1, 2, 37, 1])
"""Tokens of rows with drafts, and before these, and accepted ones. Of one row, native kernels do not make all ready at once."""
KINDS = ("short convolution", "gated delta rule", "decays of rows", "scan", "selective scan")


def step_of(
    kind: str, device: torch.device, lengths: tuple[list[int], list[int]], dims: tuple[int, int]
) -> tuple[Blocks, Callable[[RecurrentKernels], Tensor]]:
    """Returns blocks, and what runs a kernel on these. Inputs are of FP32."""
    rows, shape = {"short convolution": (3, (24,)), "selective scan": (8, (40,))}.get(kind, (4, dims))
    blocks = Blocks.of(rows, shape, *lengths, device)
    tokens = len(blocks.meta.positions)
    if kind == "short convolution":
        x, weight = strided(tokens, 24, dtype=FP32, device=device), torch.randn(4, 24, device=device)
        return blocks, lambda kernels: kernels.short_convolution(x, weight, None, blocks.state, blocks.meta, silu=True)
    inputs: DeltaInputs | ScanInputs | MambaInputs
    if kind == "selective scan":
        inputs = MambaInputs.of(tokens, 40, 8, FP32, device)
    elif kind == "scan":
        inputs = ScanInputs.of(tokens, (2, 4), dims, FP32, device)
    else:
        inputs = DeltaInputs.of(tokens, (2, 4), dims, FP32, device, row_decays=kind == "decays of rows")
    return blocks, lambda kernels: inputs.run(kernels, blocks)


def check_drafts(
    kernels: RecurrentKernels,
    device: torch.device,
    kind: str,
    *,
    rows: tuple[list[int], list[int], list[int]] = LONG_AND_SHORT,
    dims: tuple[int, int] = (32, 24),
) -> None:
    """Compares a step whose states take in nothing, then accepted tokens, then the others, with one that takes in all at once."""
    *lengths, accepted = rows
    blocks, run = step_of(kind, device, (lengths[0], lengths[1]), dims)
    meta, before = blocks.meta, blocks.storage.clone()
    real, starts = meta.block_tables[:-1], meta.query_start[:-1].tolist()
    expected = run(kernels)[:-1]
    states = blocks.state.read(real)
    blocks.storage.copy_(before)
    taken = torch.tensor([*accepted, 1], dtype=torch.int32, device=device)
    blocks.meta = replace(meta, taken=torch.zeros_like(taken))
    assert_near(run(kernels)[:-1], expected, 1e-5)
    assert torch.equal(blocks.storage.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0)), "states stay as they were"
    blocks.meta = replace(meta, taken=taken.masked_fill(taken == 2, 0))
    run(kernels)
    blocks.meta = replace(meta, taken=taken.masked_fill(taken != 2, 0))
    run(kernels)
    # The rest: what is taken in already only fills the step up.
    slots, ends = meta.slot_mapping.clone(), [start + count for start, count in zip(starts, accepted, strict=False)]
    slots[[at for start, end in zip(starts, ends, strict=False) for at in range(start, end)]] = -1
    cuts = [cut for start, end in zip(starts, ends, strict=False) for cut in (start, end)]
    blocks.meta = replace(
        meta,
        slot_mapping=slots,
        query_start=torch.tensor([*cuts, starts[-1], starts[-1] + 1], dtype=torch.int32, device=device),
        context_lens=meta.context_lens.repeat_interleave(2)[:-1],
        block_tables=meta.block_tables.repeat_interleave(2, dim=0)[:-1],
    )
    found = run(kernels)
    rest = torch.cat([torch.arange(end, after) for end, after in zip(ends, starts[1:], strict=True)])
    assert_near(found[rest], expected[rest], 1e-5)
    assert_near(blocks.state.read(real), states, 1e-5)


def check_grouped_norm(kernels: RecurrentKernels, device: torch.device, *, dim: int, dtype: torch.dtype) -> None:
    """Compares with BambaRMSNormGated, whose gate comes first."""
    norm = BambaRMSNormGated(3 * dim, dim, 1e-5)
    norm.weight.data = torch.randn(3 * dim).to(device, dtype)
    x, gate = strided(7, 3, dim, dtype=dtype, device=device), 3 * strided(7, 3, dim, dtype=dtype, device=device)
    with torch.no_grad():
        expected = norm(x.flatten(1), gate.flatten(1)).view(7, 3, dim)
    actual = kernels.gated_rms_norm(x, gate, norm.weight.data.view(3, dim), 1e-5, gate_first=True)
    assert actual.is_contiguous()
    assert_near(actual, expected, 1e-5)


def check_gated_rms_norm(
    kernels: RecurrentKernels,
    device: torch.device,
    *,
    dim: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    sigmoid: bool = False,
) -> None:
    """Compares with Qwen3NextRMSNormGated, or with KimiLinearRMSNormGated, whose gate is a sigmoid."""
    norm = (KimiLinearRMSNormGated if sigmoid else Qwen3NextRMSNormGated)(dim, 1e-5)
    norm.weight.data = torch.randn(dim).to(device, weight_dtype)
    x, gate = strided(7, 3, dim, dtype=dtype, device=device), 3 * strided(7, 3, dim, dtype=dtype, device=device)
    with torch.no_grad():
        expected = norm(x, gate)
    actual = kernels.gated_rms_norm(x, gate, norm.weight.data, 1e-5, sigmoid=sigmoid)
    assert actual.is_contiguous()
    assert_near(actual, expected, 1e-5)
