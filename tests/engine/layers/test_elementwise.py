"""Norms and activations: the native kernels and torch give the same, in fp32 and bf16."""

import pytest
import torch
from starling_engine import native
from starling_engine.layers.activation import silu_and_mul
from starling_engine.layers.norm import RMSNorm
from torch.nn import functional as F

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "native"], autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("this machine has no native kernels")


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.01)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rms_norm_adds_the_residual_first(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    norm = RMSNorm("norm", 48, 1e-5, dtype, CPU)
    norm.weight_slots()["norm.weight"].load(numbers(48, seed=0, dtype=dtype))
    x, residual = numbers(tokens, 48, seed=1, dtype=dtype), numbers(tokens, 48, seed=2, dtype=dtype)
    total = x.float() + residual.float()
    expected = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.float()
    normed, kept = norm.forward(x.clone(), residual.clone())
    assert normed.dtype == kept.dtype == dtype
    torch.testing.assert_close(kept.float(), total, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(normed.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_without_a_residual_hands_its_input_on(dtype: torch.dtype) -> None:
    norm = RMSNorm("norm", 48, 1e-5, dtype, CPU)
    norm.weight_slots()["norm.weight"].load(torch.ones(48))
    x = numbers(3, 48, seed=1, dtype=dtype)
    before = x.clone()
    normed, kept = norm.forward(x, None)
    assert torch.equal(kept, before)
    torch.testing.assert_close(normed, F.rms_norm(before, (48,), norm.weight, 1e-5))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03), (torch.float16, 0.01)])
def test_silu_and_mul(dtype: torch.dtype, tolerance: float) -> None:
    x = numbers(5, 96, seed=3, dtype=dtype)
    gate, up = x.float().chunk(2, -1)
    found = silu_and_mul(dtype, CPU)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), F.silu(gate) * up, atol=tolerance, rtol=tolerance)
