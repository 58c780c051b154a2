"""Norms of hidden states: where each rounds."""

import pytest
import torch
from starling_engine import native
from starling_engine.layers.norm import RMSNorm

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_added_to_1_is_not_rounded(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of these weights plus 1 is 1 in bfloat16."""
    if not kernels:
        monkeypatch.setattr(native, "load", lambda: None)
    x, weight = torch.randn(50, 64).to(BF16), torch.linspace(-1 / 600, 1 / 600, 64).to(BF16)
    norm = RMSNorm("norm", 64, 1e-6, BF16, CPU, plus_one=True)
    norm.weight_slots()["norm.weight"].load(weight)
    found, _ = norm.forward(x.clone(), None)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * (1 + weight.float())
    assert (found == expected.to(BF16)).double().mean() > 0.995
