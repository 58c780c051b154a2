"""The MLP's gate against its torch reference, and how it compiles."""

import pytest
import torch
from starling_engine.kernels import activation
from starling_engine.layers.activation import silu_and_mul
from starling_engine.native import reference
from starling_engine.platforms.triton_support import INTERPRETED

from .compiled import compiled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("rows", "size", "dtype"), [(1, 3072, BF16), (3, 768, FP16), (2, 1500, FP32), (5, 33, BF16), (0, 64, BF16)]
)
def test_silu_mul(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = (8 * torch.randn(rows, 2 * size, device=device)).to(dtype)
    actual, expected = activation.silu_mul(gate_up), reference.silu_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == FP32 else 2**-7, atol=1e-6)
    if dtype != FP32:
        # Each is fp32 rounded twice, so only what lies at a rounding's edge may differ.
        assert actual.ne(expected).sum() <= 0.01 * actual.numel()


def test_the_gate_is_this_where_triton_runs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv(INTERPRETED, "1")
    assert silu_and_mul(FP16, device) is activation.silu_mul
    monkeypatch.delenv(INTERPRETED)
    assert silu_and_mul(FP16, torch.device("cpu")) is not activation.silu_mul


def launch(rows: int, size: int) -> None:
    activation.silu_mul(torch.empty(rows, 2 * size, dtype=BF16, device="meta"))


@pytest.mark.parametrize("size", [768, 14336])
def test_compiles_to_16_byte_accesses_without_spills(size: int) -> None:
    (kernel,) = compiled(launch, 64, size)
    assert kernel.stack == 0
    assert kernel.ptx.count("ld.global.v4.b32") == 2 and "st.global.v4.b32" in kernel.ptx
