"""Every linear method multiplies what was loaded, however many tensors the matrix came in."""

from collections.abc import Callable

import pytest
import torch
from starling_engine import native
from starling_engine.layers import linear_dense
from starling_engine.layers.linear import Linear, LinearMethod, LinearShape, stacked
from starling_engine.layers.linear_dense import DenseLinear, ExactLinear
from starling_engine.layers.linear_packed import MkldnnLinear, NativeLinear
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.native import encoder_ops
from torch.nn import functional as F

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def cases() -> list[object]:
    has_mkldnn = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [
        pytest.param(DenseLinear, torch.float32, id="dense-fp32"),
        pytest.param(DenseLinear, BF16, id="dense-bf16"),
        pytest.param(NativeLinear, BF16, id="native", marks=pytest.mark.skipif(native.load() is None, reason="no native kernels")),
        pytest.param(MkldnnLinear, torch.float32, id="mkldnn-fp32"),
        pytest.param(MkldnnLinear, BF16, id="mkldnn", marks=pytest.mark.skipif(not has_mkldnn, reason="no bf16 oneDNN")),
    ]


def filled(
    method: LinearMethod, shape: LinearShape, dtype: torch.dtype, stored: torch.dtype = BF16
) -> tuple[Linear, torch.Tensor, torch.Tensor]:
    """The layer, and the weight and bias that it was given, in fp32."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear(shape, method, dtype, CPU)
    weights, biases = [], []
    # Biases before weights and the last module first: the order must not matter.
    for name, slot in reversed(layer.weight_slots().items()):
        tensor = torch.randn(slot.shape, generator=generator).to(stored)
        slot.load(tensor)
        (biases if name.endswith(".bias") else weights).insert(0, tensor.float())
    return layer, torch.cat(weights), torch.cat(biases) if biases else torch.zeros(shape.out_size)


@pytest.mark.parametrize(("make", "dtype"), cases())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_applies_the_stacked_matrix(make: Callable[[], LinearMethod], dtype: torch.dtype, bias: bool, rows: int) -> None:
    layer, weight, added = filled(make(), stacked(["q", "k", "v"], [48, 16, 24], 32, bias), dtype)
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.linear(x.float(), weight, added)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for out_dtype in (None, torch.float32):
        out = layer.forward(x, out_dtype)
        assert out.dtype == (out_dtype or dtype)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=0.01)


@pytest.mark.parametrize(("make", "dtype"), cases())
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_matrix_gives_the_gated_product(make: Callable[[], LinearMethod], dtype: torch.dtype, bias: bool) -> None:
    layer, weight, added = filled(make(), stacked(["gate", "up"], [24, 24], 32, bias, gated=True), dtype)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate, up = F.linear(x.float(), weight, added).chunk(2, dim=-1)
    out = layer.forward(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), F.silu(gate) * up, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("has_native", [False, True])
@pytest.mark.parametrize("stored", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [64, 63])
def test_an_exact_matrix_is_not_rounded(
    dtype: torch.dtype, has_native: bool, stored: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on its way, nor when it is loaded: routers of ERNIE, Hunyuan and MiniMax are float32 in bfloat16 models."""
    if not has_native:
        monkeypatch.setattr(native, "load", lambda: None)
    shape = stacked(["gate"], [24], columns, bias=True, exact=True)
    layer, weight, bias = filled(select_linear_method(dtype, CPU)(shape), shape, dtype, stored)
    x = torch.randn(19, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = layer.forward(x, torch.float32)
    torch.testing.assert_close(out, F.linear(x.float(), weight, bias), atol=1e-4, rtol=0)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Lets the CPU sum products in fp32 as a GPU does; returns the shapes of what is multiplied so."""
    found: list[tuple[int, ...]] = []

    def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert x.dtype == weight.dtype == BF16 and out.dtype == torch.float32
        found.append(tuple(weight.shape))
        out.copy_(x.float() @ weight.float().t())

    monkeypatch.setattr(linear_dense, "sums_in_fp32", lambda dtype, _: dtype == BF16)
    monkeypatch.setattr(linear_dense, "linear_fp32", product)
    return found


def test_logits_are_not_rounded_where_the_device_sums_in_fp32(sums: list[tuple[int, ...]]) -> None:
    shape = stacked(["head"], [24], 64)
    layer, weight, _ = filled(DenseLinear(), shape, BF16)
    x = torch.randn(19, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    out = torch.empty(19, 24)
    layer.forward_into(x, out)
    assert torch.equal(out, x.float() @ weight.t()) and torch.equal(layer.forward(x, torch.float32), out)
    assert sums == [(24, 64)] * 2
    assert not torch.equal(layer.forward(x).float(), out), "the model's own dtype is rounded"


@pytest.mark.parametrize("stored", [BF16, torch.float32], ids=str)
def test_an_exact_matrix_is_kept_in_few_bytes_where_that_loses_nothing(stored: torch.dtype, sums: list[tuple[int, ...]]) -> None:
    """A router in float32 stays in it."""
    shape = stacked(["gate"], [24], 64, exact=True)
    layer, weight, _ = filled(ExactLinear(), shape, BF16, stored)
    x = torch.randn(19, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    torch.testing.assert_close(layer.forward(x, torch.float32), F.linear(x.float(), weight), atol=1e-4, rtol=0)
    assert layer.method._weight.dtype == stored and len(sums) == (stored == BF16)  # type: ignore[attr-defined]
    assert layer.forward(x).dtype == BF16


@pytest.mark.parametrize(("make", "dtype"), cases()[:3])
def test_looks_rows_up_in_the_matrix_that_it_multiplies(make: Callable[[], LinearMethod], dtype: torch.dtype) -> None:
    layer, weight, _ = filled(make(), stacked(["embed"], [50], 32, lookup=True), dtype)
    ids = torch.tensor([0, 49, 7, 7, 16])
    found = layer.method.lookup(ids)
    assert found.dtype == dtype
    assert torch.equal(found.float(), weight[ids])


def test_names_its_tensors_as_the_checkpoint_does() -> None:
    layer = Linear(stacked(["a.gate", "a.up"], [6, 4], 2, bias=True), DenseLinear(), torch.float32, CPU)
    assert {name: slot.shape for name, slot in layer.weight_slots().items()} == {
        "a.gate.weight": (6, 2),
        "a.up.weight": (4, 2),
        "a.gate.bias": (6,),
        "a.up.bias": (4,),
    }


@pytest.mark.parametrize(("make", "dtype"), cases()[2:])
def test_packing_keeps_no_second_copy(make: Callable[[], LinearMethod], dtype: torch.dtype) -> None:
    layer, _, _ = filled(make(), stacked(["a"], [64], 64), dtype)
    staged = layer.method._staged  # type: ignore[attr-defined]
    assert staged.weight is None and staged.bias is None


WIDE = stacked(["a"], [64], 64)
EXACT = stacked(["a"], [64], 64, exact=True)
TIED = stacked(["a"], [64], 64, lookup=True)


@pytest.mark.parametrize(
    ("dtype", "has_native", "shape", "expected"),
    [
        (torch.float32, True, WIDE, "dense"),
        (torch.float16, True, WIDE, "dense"),
        (BF16, True, WIDE, "native"),
        (BF16, True, TIED, "native"),
        (BF16, True, stacked(["a"], [64], 63), "dense"),
        (BF16, True, stacked(["a", "b"], [32, 32], 64, gated=True), "native"),
        (BF16, True, stacked(["a", "b"], [28, 28], 64, gated=True), "dense"),
        (BF16, False, WIDE, "mkldnn"),
        (BF16, False, TIED, "dense"),
        (BF16, True, EXACT, "native exact"),
        (BF16, False, EXACT, "exact"),
        (torch.float16, True, EXACT, "exact"),
    ],
)
def test_the_selector_says_what_it_takes(
    dtype: torch.dtype,
    has_native: bool,
    shape: LinearShape,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(native, "load", lambda: object() if has_native else None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    with caplog.at_level("INFO", "starling.layers"):
        select = select_linear_method(dtype, CPU)
    assert select(shape).name == expected
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("linear layers: ")


@pytest.mark.parametrize(("shape", "expected"), [(WIDE, "mkldnn"), (TIED, "dense")])
def test_encoders_in_float32_are_multiplied_in_onednns_layout_or_our_own(shape: LinearShape, expected: str) -> None:
    if expected == "mkldnn" and encoder_ops.are_fastest(torch.float32, CPU):
        expected = "native fp32"
    assert select_linear_method(torch.float32, CPU, causal=False)(shape).name == expected
