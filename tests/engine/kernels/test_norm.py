"""RMSNorm against its torch reference, and how it compiles."""

import pytest
import torch
from starling_engine.kernels import norm
from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.layers.norm import RMSNorm
from starling_engine.native import reference
from starling_engine.platforms.triton_support import INTERPRETED

from .compiled import compiled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (1, 4096, BF16),
    (3, 5120, BF16),
    (2, 7168, FP16),
    (5, 1024, FP32),
    (37, 128, BF16),
    (70, 100, FP32),
    (2, 16385, BF16),
]


def _same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Allows for sums in another order: in 16 bits a value in a hundred may round to its neighbour."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-6 if actual.dtype == FP32 else 2**-7, atol=0)
    if actual.dtype != FP32:
        assert (actual != expected).float().mean() <= 0.01


@pytest.mark.parametrize(("rows", "size", "dtype"), SHAPES)
@pytest.mark.parametrize(("in_place", "wide"), [(False, False), (True, False), (False, True)])
def test_rms_norm_and_with_the_residual(
    rows: int, size: int, dtype: torch.dtype, in_place: bool, wide: bool, device: torch.device
) -> None:
    """Wide weights are of fp32."""
    torch.manual_seed(0)
    x, residual = (3 * torch.randn(2, rows, size, device=device)).to(dtype).unbind()
    weight = (1 + torch.randn(size, device=device) / 8).to(FP32 if wide else dtype)
    expected, actual = torch.empty_like(x), x.clone() if in_place else torch.full_like(x, torch.nan)
    reference.rms_norm(x, weight, 1e-6, expected)
    norm.rms_norm(actual if in_place else x, weight, 1e-6, actual)
    _same(actual, expected)

    expected_residual, actual_residual = residual.clone(), residual.clone()
    actual = x.clone() if in_place else torch.full_like(x, torch.nan)
    reference.add_rms_norm(x, expected_residual, weight, 1e-6, expected)
    norm.add_rms_norm(actual if in_place else x, actual_residual, weight, 1e-6, actual)
    assert torch.equal(actual_residual, expected_residual)
    _same(actual, expected)


def test_no_rows_and_rows_of_zeros(device: torch.device) -> None:
    x, weight = torch.zeros(2, 64, device=device), torch.ones(64, device=device)
    norm.rms_norm(x[:0], weight, 1e-6, x[:0])
    norm.rms_norm(x, weight, 1e-6, x)
    assert x.eq(0).all()


def test_the_layer_takes_it_where_triton_runs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    other = RMSNorm("norm", 64, 1e-5, FP16, torch.device("cpu"))
    monkeypatch.setenv(INTERPRETED, "1")
    layer = RMSNorm("norm", 64, 1e-5, FP16, device)
    assert elementwise_kernels(torch.float64, device) == "torch"
    assert elementwise_kernels(FP16, device) == "triton"
    x, residual, weight = torch.randn(3, 5, 64).half().unbind()
    for norm_layer in (layer, other):
        norm_layer.weight_slots()["norm.weight"].load(weight[0])
    for added in (None, residual):
        expected = other.forward(x.clone(), added if added is None else added.clone())
        actual = layer.forward(x.to(device), added if added is None else added.to(device))
        for one, two in zip(actual, expected, strict=True):
            torch.testing.assert_close(one.cpu(), two, rtol=2e-3, atol=1e-6)


def launch(size: int, dtype: torch.dtype) -> None:
    x = torch.empty(256, size, dtype=dtype, device="meta")
    norm.add_rms_norm(x, torch.empty_like(x), torch.empty(size, dtype=dtype, device="meta"), 1e-6, x)


@pytest.mark.parametrize(("size", "dtype"), [(128, BF16), (5120, BF16), (8192, FP32)])
def test_compiles_to_16_byte_accesses_without_spills(size: int, dtype: torch.dtype) -> None:
    (kernel,) = compiled(launch, size, dtype)
    assert kernel.stack == 0
    assert "ld.global.v4.b32" in kernel.ptx and "st.global.v4.b32" in kernel.ptx
