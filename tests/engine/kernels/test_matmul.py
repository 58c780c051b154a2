"""Matmuls of half dtypes that torch would emulate are computed in float32, in pieces, and give what torch's own give."""

import pytest
import torch
from starling_engine.kernels import matmul
from torch.nn import functional as F

HALVES = [torch.bfloat16, torch.float16]


def some(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "is_emulated", lambda *_: True)
    monkeypatch.setattr(matmul, "SCRATCH_ELEMENTS", 32 * 7)  # pieces of 7 rows, and a rest


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("has_mkldnn", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, matmul.MAX_EMULATED_ROWS + 1, 40])
def test_linear(dtype: torch.dtype, has_mkldnn: bool, bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_mkldnn:
        monkeypatch.setattr(matmul, "has_mkldnn", lambda: False)
    x, weight, added = some(rows, 32, dtype=dtype), some(24, 32, dtype=dtype), some(24, dtype=dtype) if bias else None
    out = matmul.linear(x, weight, added)
    assert out.dtype == dtype
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)  # rounded once, at the end


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bmm(dtype: torch.dtype) -> None:
    x, weight = some(3, 5, 16, dtype=dtype), some(3, 16, 8, dtype=dtype)
    out = matmul.bmm(x, weight)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.bmm(x.double(), weight.double()), atol=1e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("dtype", "device", "mkldnn", "expected"),
    [
        (torch.bfloat16, "cpu", False, True),
        (torch.bfloat16, "cpu", True, False),
        (torch.float16, "cpu", False, True),
        (torch.float32, "cpu", False, False),
        (torch.bfloat16, "cuda", False, False),
    ],
)
def test_what_is_emulated(dtype: torch.dtype, device: str, mkldnn: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_mkldnn_bf16", "_has_mkldnn_fp16"):
        monkeypatch.setattr(matmul, name, lambda: mkldnn)
    assert matmul.is_emulated.__wrapped__(dtype, device) is expected
