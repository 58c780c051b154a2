"""Kernels that go element by element against their torch references, over rows that are no multiples of 16."""

from collections.abc import Iterator

import pytest
import torch
from starling_engine.model_config.layer import Temperature
from starling_engine.native import elementwise_ops, load, ops, reference
from torch.nn import functional as F

from tests.engine.instruction_sets import every_set, using

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = pytest.mark.parametrize("name", elementwise_ops.ACTIVATIONS)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32])
SHAPES = pytest.mark.parametrize(("tokens", "width"), [(1, 3072), (3, 50), (70, 1030)])
ROUNDED = {BF16: 8e-3, FP32: 1e-6}

pytestmark = pytest.mark.skipif(load() is None, reason="this machine has no native kernels")


@pytest.fixture(autouse=True, scope="module", params=every_set())
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels of each instruction set that this CPU has; in a run without --whole, those of the best."""
    with using(request.param):
        yield


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a rounding of the largest: torch's own activations are no more exact."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDED[found.dtype] * float(expected.abs().max()))


@NAMES
@DTYPES
@SHAPES
def test_activations(name: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    x = 4 * torch.randn(tokens, width).to(dtype)
    expected = reference.activate(name, x.clone())
    assert elementwise_ops.activate(name, x) is x
    assert_close(x, expected)


@NAMES
@DTYPES
@SHAPES
def test_gated_activations(name: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(tokens, 2 * width).to(dtype)
    assert_close(elementwise_ops.activate_and_mul(name, gate_up), reference.activate_and_mul(name, gate_up))


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_gelu_is_as_exact_as_torch(name: str) -> None:
    x = torch.linspace(-12, 12, 100_001).unsqueeze(0)
    wanted = reference.activate(name, x.double())
    errors = [(kernels.activate(name, x.clone()) - wanted).abs().max().item() for kernels in (reference, elementwise_ops)]
    assert errors[1] <= max(errors[0], 6e-7)


@NAMES
def test_activations_show_what_is_not_a_number(name: str) -> None:
    found = elementwise_ops.activate(name, torch.tensor([[torch.nan, 3e38, -3e38, 0.0]]))
    assert found[0, 0].isnan() and found[0, 1] > 1e38 and found[0, 2:].abs().sum() == 0


def _slopes(dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns parameters of xIELU: both slopes, beta and eps."""
    return [torch.tensor([number]).to(dtype) for number in (0.8, -1.3)] + [torch.tensor(each).to(dtype) for each in (0.5, -1e-6)]


@DTYPES
@SHAPES
def test_xielu(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, slopes = 4 * torch.randn(tokens, width).to(dtype), _slopes(dtype)
    expected = reference.xielu(x.clone(), *slopes)
    assert elementwise_ops.xielu(x, *slopes) is x
    assert_close(x, expected)


def test_xielu_is_exact_near_nothing() -> None:
    """There exp(x) - 1 - x is the difference of numbers that are nearly the same."""
    x = torch.cat([-torch.logspace(-8, 2, 1000), torch.logspace(-8, 2, 1000), torch.zeros(1)]).unsqueeze(0)
    slopes = _slopes(FP32)
    slopes[2].zero_()  # beta x would hide it
    wanted = reference.xielu(x.double(), *(each.double() for each in slopes)).float()
    torch.testing.assert_close(elementwise_ops.xielu(x.clone(), *slopes), wanted, rtol=1e-6, atol=1e-12)
    found = elementwise_ops.xielu(torch.tensor([[torch.nan, 3e38, -3e37]]), *slopes)
    assert found[0, 0].isnan() and found[0, 1].isinf() and found[0, 2].isfinite()


@DTYPES
@SHAPES
def test_sums_and_multiples_of_strided_rows(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, to = (torch.randn(tokens, width + 5).to(dtype) for _ in range(2))
    for by in (1.0, 0.3):
        kept, expected = to.clone(), to.clone()
        assert_close(elementwise_ops.multiple(x[:, :width], by), reference.multiple(x[:, :width], by))
        elementwise_ops.add(kept[:, 1:-4], x[:, 5:], by)
        reference.add(expected[:, 1:-4], x[:, 5:], by)
        elementwise_ops.multiply(kept[:, 2:-3], by)
        reference.multiply(expected[:, 2:-3], by)
        assert_close(kept, expected)


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("shape", [(1, 3), (3, 5001)])
def test_logits_are_divided_and_then_capped(cap: float, shape: tuple[int, int]) -> None:
    logits = 100 * torch.randn(*shape)
    logits[0, :2] = torch.tensor([1e30, -1e30])
    expected = reference.finish_logits(logits.clone(), 0.7, cap)
    assert elementwise_ops.finish_logits(logits, 0.7, cap) is logits
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-5)


def test_a_norm_of_strided_rows_leaves_what_is_beside_them() -> None:
    """Norms of queries and keys over all heads read such rows, and write them in place."""
    qkv, weight = torch.randn(3, 50).to(BF16), torch.randn(20)
    part, before = qkv[:, 10:30], qkv.clone()
    wide = part.float()
    expected = (F.rms_norm(wide, (20,), None, 1e-6) * weight).to(BF16)
    ops.rms_norm(part, weight, 1e-6, part)
    assert_close(part, expected)
    assert torch.equal(qkv[:, :10], before[:, :10]) and torch.equal(qkv[:, 30:], before[:, 30:])


@DTYPES
@pytest.mark.parametrize("sigmoid", [False, True])
def test_rows_are_multiplied_by_numbers_of_their_own(sigmoid: bool, dtype: torch.dtype) -> None:
    """Gates of shared experts are such numbers, and scales of experts by their ids. All rows may have one number of their type."""
    x, by, at = torch.randn(5, 53).to(dtype), 2 * torch.randn(5), torch.tensor([3, 0, 0, 2, 4])
    for numbers, index in ((by, None), (by, at), (by[1:2].to(dtype), None)):
        kept, expected = x.clone(), x.clone()
        found = elementwise_ops.multiply_rows(x[:, :50], numbers, index, torch.empty(5, 50, dtype=dtype), sigmoid=sigmoid)
        assert_close(found, reference.multiply_rows(x[:, :50], numbers, index, torch.empty(5, 50, dtype=dtype), sigmoid=sigmoid))
        elementwise_ops.multiply_rows(kept[:, 1:50], numbers, index, sigmoid=sigmoid)
        reference.multiply_rows(expected[:, 1:50], numbers, index, sigmoid=sigmoid)
        assert_close(kept, expected)


def test_a_row_without_an_expert_reads_no_number_before_the_first() -> None:
    x, by = torch.ones(2, 1), torch.tensor([torch.nan, 2.0, 3.0])[1:]
    assert not elementwise_ops.multiply_rows(x, by, torch.tensor([-1, 1])).isnan().any()
    assert x[1] == 3


@DTYPES
def test_temperatures_of_queries(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 8190, 8191, 1_000_000])
    x, temperature = torch.randn(4, 70).to(dtype), Temperature(8192, 0.1)
    kept, expected = x.clone(), x.clone()
    elementwise_ops.temper(kept[:, :50], positions, temperature)
    reference.temper(expected[:, :50], positions, temperature)
    assert_close(kept, expected)
    assert torch.equal(kept[:2], x[:2]) and not torch.equal(kept[2], x[2])
