"""Linear layers with quantized weights, their own or a checkpoint's, against the quantized matrix in torch."""

from dataclasses import replace

import pytest
import torch
from starling_engine import native
from starling_engine.errors import ConfigError
from starling_engine.layers.linear import Linear, LinearShape, stacked
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.native.group_quantized import (
    INT4,
    INT8,
    Format,
    GroupQuantized,
    gather_columns,
    gathered,
    quantize,
    quantized_linear,
)
from starling_engine.native.reference import silu_mul
from starling_engine.topology.shard import Share

pytestmark = pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPES = {
    "one": stacked(["a"], [100], 64, bias=True),
    "stacked": stacked(["q", "k", "v"], [64, 32, 32], 192, bias=True),
    "gated": stacked(["gate", "up"], [48, 48], 64, gated=True),
    "tied head": stacked(["embed"], [130], 64, lookup=True),
}


def loaded(shape: LinearShape, name: str) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    """Returns a layer, with the matrix and bias that it was loaded with."""
    layer = Linear(shape, select_linear_method(BF16, CPU, name)(shape), BF16, CPU)
    tensors = {each: torch.randn(slot.local_shape).to(BF16) for each, slot in layer.weight_slots().items()}
    for each, slot in layer.weight_slots().items():
        slot.load(tensors[each])
    parts = {kind: [tensor for each, tensor in tensors.items() if each.endswith(kind)] for kind in ("weight", "bias")}
    return layer, torch.cat(parts["weight"]), torch.cat(parts["bias"]) if parts["bias"] else None


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_product_is_that_of_the_quantized_matrix(shape: LinearShape, name: str) -> None:
    torch.manual_seed(0)
    layer, weight, bias = loaded(shape, name)
    x = torch.randn(4, shape.in_size).to(BF16)  # of more, tiles of AMX round FP8 times its scales to bfloat16
    form = ONLINE[name].cut(0, shape.in_size)
    assert form is not None
    expected = quantized_linear(x, quantize(weight, form), bias, torch.float32, gated=shape.gated)
    torch.testing.assert_close(layer.forward(x, torch.float32), expected, rtol=1e-4, atol=1e-4)
    assert layer.forward(x).dtype == BF16
    if shape.lookup:
        ids = torch.tensor([129, 0, 17])
        torch.testing.assert_close(layer.method.lookup(ids), quantize(weight, form).dequantized()[ids].to(BF16))


@pytest.mark.parametrize(("name", "bits"), [("int8", 8.25), ("int4", 4.5)])
def test_the_plan_counts_what_is_held(name: str, bits: float) -> None:
    layer, weight, bias = loaded(SHAPES["stacked"], name)
    assert bias is not None
    assert sum(slot.held_bytes(2) for slot in layer.weight_slots().values()) == weight.numel() * bits / 8 + bias.nbytes
    assert layer.method._weight.nbytes == weight.numel() * bits / 8  # type: ignore[attr-defined]


def test_what_is_exact_stays_so() -> None:
    assert select_linear_method(BF16, CPU, "int8")(stacked(["router"], [64], 63, exact=True)).name == "native exact"


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        (torch.float32, SHAPES["one"], "this is torch.float32"),
        (BF16, stacked(["o"], [64], 48), r"o \(64 x 48 on a rank\): it wants columns in multiples of 32$"),
        (BF16, stacked(["gate", "up"], [28, 28], 64, gated=True), "gate, up .* and 16 rows"),
    ],
)
def test_what_is_not_possible_is_an_error(dtype: torch.dtype, shape: LinearShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        select_linear_method(dtype, CPU, "int4")(shape)
    assert caught.value.field == "quantization"


def test_without_kernels_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    with pytest.raises(ConfigError, match="there are no native kernels here"):
        select_linear_method(BF16, CPU, "int8")


FOUR, SIX = Format(4, minima=True), Format(6, group=16, zero=32)
STORED: dict[str, tuple[LinearShape, tuple[Format, ...]]] = {
    "one format": (SHAPES["stacked"], (FOUR, FOUR, FOUR)),
    "values in more bits": (SHAPES["stacked"], (FOUR, FOUR, SIX)),
    "three formats": (SHAPES["stacked"], (SIX, FOUR, INT8)),
    "gated": (SHAPES["gated"], (FOUR, FOUR)),
    "gate and up of two formats": (SHAPES["gated"], (FOUR, SIX)),
    "gated, rows no multiple of 16": (stacked(["gate", "up"], [20, 20], 64, gated=True), (FOUR, FOUR)),
    "tied head": (SHAPES["tied head"], (SIX,)),
    "embedding": (stacked(["embed"], [130], 64, only_lookup=True), (FOUR,)),
}


def stored_matrix(rows: int, columns: int, form: Format) -> GroupQuantized:
    codes = torch.randint(0, 2**form.bits, (rows, columns), dtype=torch.uint8)
    scales = torch.rand(rows, columns // form.group).half() * 0.1
    return GroupQuantized(codes, scales, form, scales.neg() if form.minima else None)


@pytest.mark.parametrize("name", STORED)
def test_codes_of_a_checkpoint_are_multiplied_as_they_are(name: str) -> None:
    torch.manual_seed(0)
    shape, forms = STORED[name]
    stored = {f"{module}.weight": form for module, form in zip(shape.names, forms, strict=True)}
    layer = Linear(shape, select_linear_method(BF16, CPU, None, stored)(shape), BF16, CPU)
    matrices, biases = [], []
    for part, slot in layer.weight_slots().items():
        if part.endswith("bias"):
            biases.append(torch.randn(slot.local_shape).to(BF16))
            slot.load(biases[-1])
        else:
            assert slot.load_codes is not None
            matrices.append(stored_matrix(*slot.local_shape, stored[part]))
            slot.load_codes(matrices[-1])
    held = sum(slot.held_bytes(2) for slot in layer.weight_slots().values())
    assert held == sum(int(each.codes.numel() * each.format.element_bytes) for each in matrices) + 2 * sum(
        b.numel() for b in biases
    )
    if shape.lookup or shape.only_lookup:
        ids = torch.tensor([129, 0, 17])
        torch.testing.assert_close(layer.method.lookup(ids), matrices[0].dequantized()[ids].to(BF16))
    if not shape.only_lookup:
        x = torch.randn(5, shape.in_size).to(BF16)
        parts = [quantized_linear(x, each, None, torch.float32) for each in matrices]
        expected = torch.cat(parts, 1) + (torch.cat(biases).float() if biases else 0.0)
        expected = silu_mul(expected) if shape.gated else expected
        largest = expected.abs().max().item()
        torch.testing.assert_close(layer.forward(x), expected.to(BF16), rtol=2e-2, atol=1e-2 * largest)


@pytest.mark.parametrize("orders", [(0, 0), (0, 1)], ids=["one order", "two orders"])
@pytest.mark.parametrize("form", [INT4, FOUR], ids=["symmetric", "minima"])
def test_columns_are_gathered(form: Format, orders: tuple[int, int]) -> None:
    """Groups of 24 to 40 columns anywhere in a row; gates and ups of one order are one matrix."""
    torch.manual_seed(0)
    shape, gathers = SHAPES["gated"], replace(form, gathered=64)
    method = select_linear_method(BF16, CPU, None, {"gate.weight": gathers, "up.weight": gathers})(shape)
    layer, matrices = Linear(shape, method, BF16, CPU), []
    for seed, slot in zip(orders, layer.weight_slots().values(), strict=True):
        group_of = torch.tensor([0] * 24 + [1] * 40)[torch.randperm(64, generator=torch.Generator().manual_seed(seed))]
        plain = stored_matrix(48, 64, form)
        matrices.append(gathered(plain.codes, plain.scales, plain.minima, group_of, gathers))
        assert slot.load_codes is not None
        slot.load_codes(matrices[-1])
    x = torch.randn(5, 64).to(BF16)
    parts = []
    for each in matrices:
        assert each.order is not None
        assert each.codes.shape == (48, 96)
        parts.append(quantized_linear(gather_columns(x, each.order), each.in_order, None, torch.float32))
    expected = silu_mul(torch.cat(parts, 1))
    torch.testing.assert_close(layer.forward(x), expected.to(BF16), rtol=2e-2, atol=1e-2 * expected.abs().max().item())
    exact = silu_mul(torch.cat([x.float() @ each.dequantized().T for each in matrices], 1))
    torch.testing.assert_close(expected, exact, rtol=0, atol=3e-2 * exact.abs().max().item())


@pytest.mark.parametrize("name", ["stacked", "gated", "tied head"])
def test_x_is_multiplied_by_the_factor_of_small_scales(name: str) -> None:
    """Queries with a factor lie beside keys and values without one."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    stored = {f"{module}.weight": FOUR for module in shape.names}
    layer, matrices = Linear(shape, select_linear_method(BF16, CPU, None, stored)(shape), BF16, CPU), []
    for part, slot in layer.weight_slots().items():
        if part.endswith("bias"):
            slot.load(torch.zeros(slot.local_shape))
            continue
        matrices.append(replace(stored_matrix(*slot.local_shape, FOUR), factor=1.0 if matrices else 2.0**-30))
        assert slot.load_codes is not None
        slot.load_codes(matrices[-1])
    x = torch.randn(5, shape.in_size).to(BF16)
    plain = [x.float() @ each.dequantized().T for each in matrices]
    expected = silu_mul(torch.cat(plain, 1)) if shape.gated else torch.cat(plain, 1)
    found, rows = layer.forward(x).float(), matrices[0].codes.shape[0]
    for columns in (slice(0, rows), slice(rows, None)) if not shape.gated else (slice(None),):
        here = expected[:, columns]
        torch.testing.assert_close(found[:, columns], here, rtol=0, atol=3e-2 * here.abs().max().item() if here.numel() else 0)
    if shape.lookup:
        ids = torch.tensor([129, 0, 17])
        torch.testing.assert_close(layer.method.lookup(ids).float(), matrices[0].dequantized()[ids], rtol=1e-2, atol=0)


def test_rows_of_a_tied_head_are_looked_up_in_the_order_of_x() -> None:
    torch.manual_seed(0)
    shape, gathers = SHAPES["tied head"], replace(FOUR, gathered=64, filled=40)
    (name,) = shape.names
    layer = Linear(shape, select_linear_method(BF16, CPU, None, {f"{name}.weight": gathers})(shape), BF16, CPU)
    (slot,) = layer.weight_slots().values()
    plain = stored_matrix(*slot.local_shape, FOUR)
    matrix = gathered(plain.codes, plain.scales, plain.minima, torch.tensor([0] * 24 + [1] * 40)[torch.randperm(64)], gathers)
    assert slot.load_codes is not None and matrix.order is not None
    slot.load_codes(matrix)
    ids, x = torch.tensor([129, 0, 17]), torch.randn(5, 64).to(BF16)
    torch.testing.assert_close(layer.method.lookup(ids), matrix.dequantized()[ids].to(BF16))
    expected = quantized_linear(gather_columns(x, matrix.order), matrix.in_order, None, torch.float32)
    torch.testing.assert_close(layer.forward(x), expected.to(BF16), rtol=2e-2, atol=1e-2 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "shape", "stored"),
    [
        (torch.float32, SHAPES["one"], {"a.weight": INT4}),
        (BF16, SHAPES["stacked"], {"q.weight": INT4, "k.weight": INT4}),
        (BF16, stacked(["a"], [64], Share(16, 32, 64)), {"a.weight": INT4}),
        (BF16, stacked(["router"], [64], 64, exact=True), {"router.weight": INT4}),
    ],
    ids=["float32", "one of three is plain", "columns of a rank within a group", "exact"],
)
def test_what_cannot_be_multiplied_as_it_is_takes_numbers(
    dtype: torch.dtype, shape: LinearShape, stored: dict[str, Format]
) -> None:
    layer = Linear(shape, select_linear_method(dtype, CPU, None, stored)(shape), dtype, CPU)
    assert all(slot.load_codes is None and slot.element_bytes is None for slot in layer.weight_slots().values())
