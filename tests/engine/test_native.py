"""Each native kernel against its torch reference, over shapes that include the odd ones."""

from collections.abc import Iterator

import pytest
import torch
from starling_engine.native import load, ops, reference
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(60),
]

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _two_threads_same_numbers() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Largest difference within `relative` of the expected tensor's largest magnitude."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    difference = (actual.double() - expected.double()).abs().max().item()
    assert difference <= relative * expected.double().abs().max().item()


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 64, 64),
        (1, 1, 2),
        (3, 50, 34),
        (8, 48, 128),
        (9, 16, 4098),
        (17, 100, 70),
        (130, 300, 5000),
        (600, 200, 66),
    ],
)
def test_linear(m: int, n: int, k: int, bias: bool, out_dtype: torch.dtype) -> None:
    x, weight = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16)
    b = torch.randn(n).to(BF16) if bias else None
    actual = ops.linear(x, ops.pack_linear(weight), b, out_dtype)
    exact = x.double() @ weight.double().T + (0.0 if b is None else b.double())
    assert_close(actual, exact.to(out_dtype), 8e-3 if out_dtype == BF16 else 1e-5)
    assert_close(actual, reference.linear(x, reference.pack_linear(weight), b, out_dtype), 1.6e-2)


def test_linear_reads_strided_rows() -> None:
    x, packed = torch.randn(5, 200).to(BF16), ops.pack_linear(torch.randn(40, 64).to(BF16))
    assert torch.equal(ops.linear(x[:, 64:128], packed), ops.linear(x[:, 64:128].contiguous(), packed))


def test_linear_of_no_rows() -> None:
    packed = ops.pack_linear(torch.randn(40, 64).to(BF16))
    assert ops.linear(torch.empty(0, 64, dtype=BF16), packed).shape == (0, 40)


@pytest.mark.parametrize(("n", "k"), [(100, 64), (33, 130)])
def test_embedding_is_the_weight_row(n: int, k: int) -> None:
    weight, ids = torch.randn(n, k).to(BF16), torch.tensor([0, n - 1, 17, 17, 5])
    out = torch.empty(len(ids), k, dtype=BF16)
    ops.embedding_packed(ids, ops.pack_linear(weight), out)
    assert torch.equal(out, weight[ids])
