"""Recurrent layers on the CPU, in torch and by the native kernels, against transformers."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from starling_engine.layers import recurrent_torch
from starling_engine.layers.recurrent import RecurrentKernels, recurrent_kernels
from starling_engine.native import load, recurrent_ops

from tests.engine.recurrent_steps import (
    BF16,
    FP32,
    KINDS,
    Blocks,
    DeltaInputs,
    MambaInputs,
    ScanInputs,
    check_drafts,
    check_gated_delta_rule,
    check_gated_rms_norm,
    check_grouped_norm,
    check_ranks,
    check_selective_scan,
    check_short_convolution,
    check_ssd_scan,
)

CPU = torch.device("cpu")


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> RecurrentKernels:
    torch.manual_seed(0)
    if request.param == "torch":
        return recurrent_torch
    if load() is None:
        pytest.skip("this machine has no native kernels")
    return recurrent_ops


@pytest.mark.parametrize(
    ("channels", "taps", "dtype", "bias", "silu"),
    [(48, 4, BF16, False, True), (50, 3, FP32, True, False), (1100, 2, BF16, True, True), (5, 6, BF16, False, False)],
)
def test_a_short_convolution(
    kernels: RecurrentKernels, channels: int, taps: int, dtype: torch.dtype, bias: bool, silu: bool
) -> None:
    check_short_convolution(kernels, CPU, channels=channels, taps=taps, dtype=dtype, bias=bias, silu=silu)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [((2, 4), (128, 128), BF16), ((1, 3), (32, 16), FP32), ((3, 3), (20, 50), BF16), ((1, 2), (256, 64), FP32)],
)
def test_a_gated_delta_rule(kernels: RecurrentKernels, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    check_gated_delta_rule(kernels, CPU, heads=heads, dims=dims, dtype=dtype, rate_scale=2.0 if heads[0] == heads[1] else 1.0)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"), [((2, 2), (128, 128), BF16), ((1, 2), (32, 16), FP32), ((3, 3), (20, 50), BF16)]
)
def test_rows_with_decays_of_their_own(
    kernels: RecurrentKernels, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    check_gated_delta_rule(kernels, CPU, heads=heads, dims=dims, dtype=dtype, row_decays=True)


@pytest.mark.parametrize("row_decays", [False, True])
def test_long_prompts_beside_decodes(kernels: RecurrentKernels, row_decays: bool) -> None:
    """Longer than what the native kernel makes ready at once."""
    check_gated_delta_rule(kernels, CPU, heads=(2, 4), dims=(32, 24), lengths=([70, 1, 33], [0, 9, 3]), row_decays=row_decays)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "dt_limits"),
    [
        ((1, 4), (128, 64), BF16, (0.0, math.inf)),
        ((2, 6), (32, 16), FP32, (0.0, math.inf)),
        ((2, 2), (20, 50), BF16, (0.3, 1.1)),
        ((1, 2), (16, 80), FP32, (0.0, math.inf)),
    ],
)
def test_a_scan(
    kernels: RecurrentKernels, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, dt_limits: tuple[float, float]
) -> None:
    check_ssd_scan(kernels, CPU, heads=heads, dims=dims, dtype=dtype, dt_limits=dt_limits)


def test_scans_of_long_prompts_beside_decodes(kernels: RecurrentKernels) -> None:
    check_ssd_scan(kernels, CPU, heads=(1, 2), dims=(32, 24), lengths=([70, 1, 33], [0, 9, 3]))


@pytest.mark.parametrize(
    ("channels", "size", "dtype"), [(512, 16, BF16), (48, 16, FP32), (300, 8, BF16), (20, 3, FP32), (5, 130, BF16)]
)
def test_a_selective_scan(kernels: RecurrentKernels, channels: int, size: int, dtype: torch.dtype) -> None:
    check_selective_scan(kernels, CPU, channels=channels, size=size, dtype=dtype)


def test_selective_scans_of_long_prompts_beside_decodes(kernels: RecurrentKernels) -> None:
    check_selective_scan(kernels, CPU, channels=40, size=16, lengths=([70, 1, 33], [0, 9, 3]))


@pytest.mark.parametrize("kind", KINDS)
def test_states_take_in_accepted_tokens_alone(kernels: RecurrentKernels, kind: str) -> None:
    check_drafts(kernels, CPU, kind)


@pytest.mark.skipif(load() is None, reason="this machine has no native kernels")
def test_any_number_of_threads_scans_channels_alike() -> None:
    torch.manual_seed(0)
    before, results = torch.get_num_threads(), []
    blocks = Blocks.of(16, (1100,), [9, 1], [3, 5], CPU)
    inputs, storage = MambaInputs.of(11, 1100, 16, BF16, CPU), blocks.storage.clone()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            blocks.storage.copy_(storage)
            results.append((inputs.run(recurrent_ops, blocks)[:-1], blocks.storage.clone().nan_to_num()))
    finally:
        torch.set_num_threads(before)
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1])


@pytest.mark.skipif(load() is None, reason="this machine has no native kernels")
@pytest.mark.parametrize("inputs_of", [DeltaInputs.of, partial(DeltaInputs.of, row_decays=True), ScanInputs.of])
def test_any_number_of_threads_gives_the_same(inputs_of: Callable[..., DeltaInputs | ScanInputs]) -> None:
    """Few heads are cut into columns for many threads."""
    torch.manual_seed(0)
    before, results = torch.get_num_threads(), []
    blocks = Blocks.of(4, (128, 128), [9, 1], [3, 5], CPU)
    inputs, storage = inputs_of(11, (2, 4), (128, 128), BF16, CPU), blocks.storage.clone()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            blocks.storage.copy_(storage)
            results.append((inputs.run(recurrent_ops, blocks)[:-1], blocks.storage.clone().nan_to_num()))
    finally:
        torch.set_num_threads(before)
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1])


def test_the_choice_of_kernels() -> None:
    assert recurrent_kernels(torch.float16, CPU) is recurrent_torch
    assert recurrent_kernels(BF16, CPU) is (recurrent_torch if load() is None else recurrent_ops)


@pytest.mark.parametrize("row_decays", [False, True])
def test_heads_of_ranks_are_those_of_one(kernels: RecurrentKernels, row_decays: bool) -> None:
    check_ranks(kernels, CPU, heads=(2, 4), dims=(32, 32), row_decays=row_decays)


@pytest.mark.parametrize(("dtype", "weight"), [(BF16, FP32), (BF16, BF16), (FP32, FP32)])
@pytest.mark.parametrize("dim", [128, 24])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_gated_norm(kernels: RecurrentKernels, sigmoid: bool, dim: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    check_gated_rms_norm(kernels, CPU, dim=dim, dtype=dtype, weight_dtype=weight, sigmoid=sigmoid)


@pytest.mark.parametrize(("dim", "dtype"), [(128, BF16), (24, FP32)])
def test_a_norm_of_groups(kernels: RecurrentKernels, dim: int, dtype: torch.dtype) -> None:
    check_grouped_norm(kernels, CPU, dim=dim, dtype=dtype)
