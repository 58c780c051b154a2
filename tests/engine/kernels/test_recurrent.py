"""Kernels of recurrent layers against transformers."""

import itertools
import math
from collections import Counter
from unittest import mock

import pytest
import torch
from starling_engine.kernels import recurrent
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import StateRows
from starling_engine.layers.recurrent import recurrent_kernels
from starling_engine.platforms.triton_support import INTERPRETED

from tests.engine.recurrent_steps import (
    BF16,
    FP32,
    KINDS,
    check_drafts,
    check_gated_delta_rule,
    check_gated_rms_norm,
    check_grouped_norm,
    check_ranks,
    check_selective_scan,
    check_short_convolution,
    check_ssd_scan,
)

from .compiled import compiled, forget_compiled, in_compiler

DECODES = ([1, 1, 1], [3, 1, 0])


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("channels", "taps", "dtype", "bias", "silu", "lengths"),
    [
        (300, 4, BF16, False, True, None),
        (48, 3, FP32, True, False, None),
        (48, 4, BF16, True, True, DECODES),
        (48, 2, BF16, True, True, ([3, 8, 2], [0, 1, 5])),
    ],
)
def test_a_short_convolution(
    device: torch.device,
    channels: int,
    taps: int,
    dtype: torch.dtype,
    bias: bool,
    silu: bool,
    lengths: tuple[list[int], list[int]] | None,
) -> None:
    more = {} if lengths is None else {"lengths": lengths}
    check_short_convolution(recurrent, device, channels=channels, taps=taps, dtype=dtype, bias=bias, silu=silu, **more)


@pytest.mark.parametrize(("heads", "dims", "dtype"), [((1, 2), (32, 16), BF16), ((2, 2), (20, 12), FP32)])
def test_a_gated_delta_rule(device: torch.device, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    check_gated_delta_rule(recurrent, device, heads=heads, dims=dims, dtype=dtype, rate_scale=2.0 if heads[0] == heads[1] else 1.0)


@pytest.mark.parametrize(("heads", "dims", "dtype"), [((1, 2), (32, 16), BF16), ((2, 2), (20, 12), FP32)])
def test_rows_with_decays_of_their_own(
    device: torch.device, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    check_gated_delta_rule(recurrent, device, heads=heads, dims=dims, dtype=dtype, row_decays=True)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "dt_limits"),
    [((1, 2), (32, 16), BF16, (0.0, math.inf)), ((2, 4), (20, 12), FP32, (0.3, 1.1))],
)
def test_a_scan(
    device: torch.device, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, dt_limits: tuple[float, float]
) -> None:
    check_ssd_scan(recurrent, device, heads=heads, dims=dims, dtype=dtype, dt_limits=dt_limits)


@pytest.mark.parametrize(("channels", "size", "dtype"), [(48, 16, BF16), (20, 3, FP32)])
def test_a_selective_scan(device: torch.device, channels: int, size: int, dtype: torch.dtype) -> None:
    check_selective_scan(recurrent, device, channels=channels, size=size, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_states_take_in_accepted_tokens_alone(device: torch.device, kind: str) -> None:
    check_drafts(recurrent, device, kind, rows=([3, 2], [2, 0], [2, 1]), dims=(16, 8))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_norm_of_groups(device: torch.device, dtype: torch.dtype) -> None:
    check_grouped_norm(recurrent, device, dim=24, dtype=dtype)


def test_heads_of_ranks_are_those_of_one(device: torch.device) -> None:
    check_ranks(recurrent, device, heads=(2, 4), dims=(16, 16))


@pytest.mark.parametrize(("dtype", "weight"), [(BF16, FP32), (BF16, BF16), (FP32, FP32)])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_gated_norm(device: torch.device, sigmoid: bool, dtype: torch.dtype, weight: torch.dtype) -> None:
    check_gated_rms_norm(recurrent, device, dim=24, dtype=dtype, weight_dtype=weight, sigmoid=sigmoid)


def test_layers_take_it_where_triton_runs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    assert recurrent_kernels(torch.float16, device) is recurrent
    assert recurrent_kernels(torch.float64, device) is not recurrent


def launch(kernel: str, first: int = 0, sequences: int = 8) -> None:
    """Launches it as a layer of Qwen3-Next does for decodes, or one of Granite 4, on the device "meta". Slots begin at `first`."""

    def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    tokens, keys, values, dim = 8, 16, 32, 128
    channels = (2 * keys + values) * dim
    integers = [empty(tokens, dtype=torch.int32) for _ in range(2)]
    positions = empty(tokens + 1, dtype=torch.int64)
    meta = AttentionMetadata(positions[:-1], positions[first:][:tokens], *integers, empty(sequences, 36, dtype=torch.int32), 1)
    x, gates = empty(tokens, channels, dtype=BF16), empty(tokens, values, dtype=BF16)
    q, k, v = (each.unflatten(1, (-1, dim)) for each in x.split([keys * dim, keys * dim, values * dim], dim=1))
    if kernel == "short convolution":
        state = StateRows(empty(99, 3 * channels), 0, 3, 0, 3, (channels,))
        recurrent.short_convolution(x, empty(4, channels), None, state, meta, silu=True)
    elif kernel == "gated delta rule":
        state = StateRows(empty(99, values * dim * dim), 0, values, 0, values, (dim, dim))
        recurrent.gated_delta_rule(q, k, v, gates, gates, empty(values), empty(values), state, meta)
    elif kernel == "decays of rows":
        state = StateRows(empty(99, values * dim * dim), 0, values, 0, values, (dim, dim))
        decays = empty(tokens, values, dim, dtype=BF16)
        recurrent.gated_delta_rule(v, v, v, decays, gates, empty(values), empty(values, dim), state, meta)
    elif kernel == "scan":
        heads, size, head_dim = 2 * values, dim, dim // 2
        state = StateRows(empty(99, heads * size * head_dim), 0, heads, 0, heads, (size, head_dim))
        steps = empty(tokens, heads, dtype=BF16)
        scanned = (v.view(tokens, heads, head_dim), q[:, :1], k[:, :1], steps, *(empty(heads) for _ in range(3)))
        recurrent.ssd_scan(*scanned, state, meta)
    elif kernel == "selective scan":
        size, wide = 16, x[:, : values * dim]
        state = StateRows(empty(99, size * values * dim), 0, size, 0, size, (values * dim,))
        b, c, vector = gates[:, :size], gates[:, size:], empty(values * dim)
        recurrent.selective_scan(wide, wide, wide, b, c, empty(size, values * dim), vector, vector, state, meta)
    elif kernel == "norm of groups":
        recurrent.gated_rms_norm(v, v, empty(values, dim), 1e-6, gate_first=True)
    else:
        recurrent.gated_rms_norm(v, v, empty(dim), 1e-6)


@pytest.mark.parametrize(
    "kernel",
    ["short convolution", "gated delta rule", "decays of rows", "gated norm", "scan", "selective scan", "norm of groups"],
)
def test_compiles_without_spills(kernel: str) -> None:
    (made,) = compiled(launch, kernel)
    assert made.stack == 0


@pytest.mark.parametrize(
    ("kernel", "name"), [("gated delta rule", "_gated_delta_rule"), ("scan", "_ssd_scan"), ("selective scan", "_selective_scan")]
)
def test_a_grid_has_room_for_all_heads_of_all_sequences(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes 65,535 programs on all axes but the first: fewer than 128 heads of 512 sequences, of Nemotron Nano 2."""
    kernels = mock.MagicMock()
    monkeypatch.setattr(recurrent, name, kernels)
    launch(kernel, sequences=4096)
    ((grid,), _) = kernels.__getitem__.call_args
    programs = {"scan": 64, "gated delta rule": 32, "selective scan": 32 * 128 // recurrent.SCAN_CHANNELS}[kernel]
    assert math.prod(grid) >= programs * 4096 and all(size < 1 << 16 for size in grid[1:])


def test_slots_begin_anywhere() -> None:
    """They lie behind those of the KV groups. Another kernel for them would be compiled in service."""
    names = ("_short_convolution", "_gated_delta_rule", "_ssd_scan", "_selective_scan")
    assert in_compiler(kernels_of_slots) == dict.fromkeys(names, 1)


def kernels_of_slots() -> Counter[str]:
    """Returns how many kernels there are of each that has slots. Runs in the compiler."""
    from starling_engine.kernels.ahead import note_launches, pretend
    from starling_engine.platforms.triton_support import H200

    pretend(H200)
    forget_compiled()

    def work() -> None:
        for kernel, first in itertools.product(("short convolution", "gated delta rule", "scan", "selective scan"), (0, 1)):
            launch(kernel, first)

    return Counter(kernel.__name__ for kernel, _ in note_launches(work))
