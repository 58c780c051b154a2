"""Experts in 2 to 8 bits against their matrices in torch, one expert after another."""

import zlib
from dataclasses import replace

import pytest
import torch
from starling_engine import native
from starling_engine.errors import ConfigError, WeightError
from starling_engine.layers.experts import ExpertNames, Experts, ExpertsShape
from starling_engine.layers.experts_quantized import QuantizedExperts
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.native.group_quantized import (
    E2M1,
    FP8,
    INT4,
    INT8,
    Format,
    GroupQuantized,
    gathered,
    places_in,
    quantize,
    quantized_linear,
    stacked,
)
from starling_engine.topology.shard import Shard, Share
from torch.nn import functional as F

from tests.engine.layers.test_experts import routes

pytestmark = pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NAMES = ExpertNames(
    "mlp.experts", ("gate_proj", "up_proj", "down_proj"), (("mlp.experts.gate_up_proj",), ("mlp.experts.down_proj",))
)
SHAPE = ExpertsShape(num_experts=7, num_slots=7, hidden_size=192, intermediate=Share.all(64))
FORMATS = {
    "int8": (INT8, INT8),
    "int4": (INT4, INT4),
    "as Q4_K_M": (Format(4, minima=True), Format(6, 16, zero=32)),
    "as MXFP4": (Format(4, table=E2M1), Format(4, 16, table=E2M1)),
    "fp8": (FP8, Format(8, 32, floats=True)),
    "as Q5_1 and Q2_K": (Format(5, minima=True), Format(2, 16, minima=True)),
}
Matrices = dict[str, GroupQuantized]


def random_matrix(rows: int, columns: int, form: Format) -> GroupQuantized:
    codes = torch.randint(0, 1 << form.bits, (rows, columns), dtype=torch.uint8)
    if form.floats:
        codes &= 0xBF  # numbers up to 1.875
    scales = (torch.rand(rows, columns // form.group) / 8 / (1 if form.floats else 1 << form.bits)).to(form.scale_dtype)
    minima = (-scales.float() * (1 << form.bits - 1)).half() if form.minima else None
    return GroupQuantized(codes, scales, form, minima)


def matrices(shape: ExpertsShape, gate_up: Format, down: Format) -> Matrices:
    torch.manual_seed(0)
    sizes = shape.intermediate.whole, shape.hidden_size
    found = {}
    for expert in range(shape.num_experts):
        found[NAMES.weight(expert, "gate")] = random_matrix(*sizes, gate_up)
        found[NAMES.weight(expert, "up")] = random_matrix(*sizes, gate_up)
        found[NAMES.weight(expert, "down")] = random_matrix(*reversed(sizes), down)
    return found


def filled(shape: ExpertsShape, source: Matrices) -> Experts:
    method = select_experts_method(BF16, CPU, None, {name: each.format for name, each in source.items()})(shape, NAMES)
    assert method.name == "quantized"
    layer = Experts(NAMES, shape, method, BF16, CPU)
    for expert in range(shape.num_experts):
        for name, slot in reversed(layer.reserve(expert).items()):
            assert slot.load_codes is not None
            rows, columns = (*slot.part, slice(None), slice(None))[:2]
            matrix = source[name]
            minima = None if matrix.minima is None else matrix.minima[rows]
            part = GroupQuantized(matrix.codes[rows], matrix.scales[rows], matrix.format, minima)
            slot.load_codes(part.columns(columns))
    return layer


def expected(source: Matrices, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape)
    for expert in ids.unique().tolist():
        tokens, which = (ids == expert).nonzero(as_tuple=True)
        gate, up, down = (source[NAMES.weight(expert, each)] for each in ("gate", "up", "down"))
        activated = quantized_linear(x[tokens], stacked([gate, up]), gated=True)
        out.index_add_(0, tokens, quantized_linear(activated, down, out_dtype=torch.float32) * weights[tokens, which][:, None])
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 3), (1, 1), (1, 7), (2, 3), (9, 7), (130, 3)])
def test_gives_what_each_expert_gives(name: str, tokens: int, top_k: int) -> None:
    source = matrices(SHAPE, *FORMATS[name])
    layer = filled(SHAPE, source)
    x = torch.randn(tokens, SHAPE.hidden_size).to(BF16)
    ids, weights = routes(tokens, top_k, SHAPE.num_experts)
    out, reference = layer.forward(x, ids, weights), expected(source, x, ids, weights)
    assert out.dtype == BF16
    # Activations that are near ties in bfloat16 may round to other codes.
    torch.testing.assert_close(out.float(), reference, rtol=2e-2, atol=2e-2 * (reference.abs().max().item() if tokens else 1))


def test_ranks_with_a_part_of_each_expert_add_up() -> None:
    source = matrices(SHAPE, *FORMATS["int4"])
    x, (ids, weights) = torch.randn(9, SHAPE.hidden_size).to(BF16), routes(9, 3, 7)
    parts = [filled(ExpertsShape(7, 7, 192, Shard(rank, 2).of(64)), source) for rank in range(2)]
    whole = filled(SHAPE, source).forward(x, ids, weights).float()
    added = sum((part.forward(x, ids, weights).float() for part in parts), torch.zeros(x.shape))
    torch.testing.assert_close(added, whole, rtol=2e-2, atol=2e-2 * whole.abs().max().item())


def copied_parts(layer: Experts, other: Experts) -> int:
    """Copies an expert's memory as EPLB does, as bytes, over what was there; returns the number of its parts."""
    other.drop(3)
    memory = other.reserve_memory(3)
    for part, to in enumerate(memory):
        to.zero_()
        data = layer.read(3, part, 0, to.numel())
        assert data is not None
        to.copy_(torch.from_numpy(data))
    other.mark_loaded(3)
    x, ids, weights = torch.randn(2, 192).to(BF16), torch.full((2, 1), 3), torch.ones(2, 1)
    assert torch.equal(layer.forward(x, ids, weights), other.forward(x, ids, weights))
    return len(memory)


def test_a_copy_of_the_memory_is_the_same_expert() -> None:
    source = matrices(SHAPE, *FORMATS["as Q4_K_M"])
    layer, other = filled(SHAPE, source), filled(SHAPE, matrices(SHAPE, *FORMATS["as Q4_K_M"]))
    assert layer.layout == other.layout
    assert copied_parts(layer, other) == 5  # codes, scales and minima; codes and scales
    held = sum(each.nbytes for each in layer.method.memory(3))
    assert held == sum(slot.held_bytes(2) for slot in layer.reserve(3).values()) == layer.bytes_each


def ordered(shape: ExpertsShape, *, minima: bool, seed: int = 0) -> Matrices:
    """Returns matrices whose groups are of columns anywhere in a row; each expert has other ones, and its gate those of its up."""
    form = Format(4, 32, 0 if minima else 8, minima=minima)
    found = {}
    for name, plain in matrices(shape, form, form).items():
        k, kind = plain.codes.shape[1], name.replace("gate", "up")
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed + zlib.crc32(kind.encode())))
        found[name] = gathered(plain.codes, plain.scales, plain.minima, order // 32, replace(form, gathered=k, filled=32))
    return found


def of_rank(matrix: GroupQuantized, rows: slice, columns: slice) -> GroupQuantized:
    """Returns a rank's part of a matrix as files give it: groups of the columns that it has, filled up."""
    start, stop, _ = columns.indices(matrix.format.gathered)
    form, order = matrix.format.cut(start, stop - start), matrix.order
    assert form is not None and order is not None
    places = places_in(order).long()
    group_of, minima = places[columns] // matrix.format.group, None if matrix.minima is None else matrix.minima[rows]
    return gathered(matrix.codes[rows, places[columns]], matrix.scales[rows], minima, group_of, form)


def gathered_experts(shape: ExpertsShape, source: Matrices) -> Experts:
    method = select_experts_method(BF16, CPU, None, {name: each.format for name, each in source.items()})(shape, NAMES)
    assert method.name == "quantized"
    layer = Experts(NAMES, shape, method, BF16, CPU)
    for expert in range(shape.num_experts):
        for name, slot in layer.reserve(expert).items():
            assert slot.load_codes is not None
            slot.load_codes(of_rank(source[name], *(*slot.part, slice(None), slice(None))[:2]))
    return layer


def of_numbers(source: Matrices, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Does as `expected` where rows of x are not rounded."""
    out = torch.zeros(x.shape)
    for expert in ids.unique().tolist():
        tokens, which = (ids == expert).nonzero(as_tuple=True)
        gate, up, down = (source[NAMES.weight(expert, each)].dequantized() for each in ("gate", "up", "down"))
        activated = F.silu(x[tokens].float() @ gate.T) * (x[tokens].float() @ up.T)
        out.index_add_(0, tokens, activated @ down.T * weights[tokens, which][:, None])
    return out


@pytest.mark.parametrize("minima", [False, True], ids=["symmetric", "minima"])
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_columns_are_gathered(tokens: int, minima: bool) -> None:
    """GPTQ with desc_act, on one rank, and on two that have some columns of each group of the downs."""
    source = ordered(SHAPE, minima=minima)
    x, (ids, weights) = torch.randn(tokens, SHAPE.hidden_size).to(BF16), routes(tokens, 3, SHAPE.num_experts)
    reference = of_numbers(source, x, ids, weights)
    one = gathered_experts(SHAPE, source)
    parts = [gathered_experts(ExpertsShape(7, 7, 192, Shard(rank, 2).of(64)), source) for rank in range(2)]
    close = {"rtol": 0, "atol": 3e-2 * reference.abs().max().item()}
    torch.testing.assert_close(one.forward(x, ids, weights).float(), reference, **close)
    added = sum((part.forward(x, ids, weights).float() for part in parts), torch.zeros(x.shape))
    torch.testing.assert_close(added, reference, **close)
    for layer in (one, *parts):
        held = sum(slot.held_bytes(2) for slot in layer.reserve(0).values())
        assert held == pytest.approx(layer.bytes_each, abs=3)


def test_a_copy_has_the_order_of_its_columns() -> None:
    layer, other = (gathered_experts(SHAPE, ordered(SHAPE, minima=True, seed=seed)) for seed in range(2))
    assert copied_parts(layer, other)


def test_orders_that_experts_cannot_have_are_named() -> None:
    source, up, down = ordered(SHAPE, minima=False), NAMES.weight(2, "up"), NAMES.weight(0, "down")
    with pytest.raises(WeightError, match=r"mlp\.experts: gate and up of an expert have their columns in two orders"):
        gathered_experts(SHAPE, {**source, up: ordered(SHAPE, minima=False, seed=5)[up]})
    codes, scales = torch.zeros(192, 64, dtype=torch.uint8), torch.ones(192, 2).half()
    uneven = gathered(codes, scales, None, torch.arange(64) // 40, source[down].format)
    with pytest.raises(WeightError, match="groups of the down of an expert have unlike numbers of columns"):
        gathered_experts(SHAPE, {**source, down: uneven})


@pytest.mark.parametrize("name", ONLINE)
def test_numbers_are_quantized_while_they_are_loaded(name: str) -> None:
    gate_up, down = ONLINE[name].cut(0, 192), ONLINE[name].cut(0, 64)
    assert gate_up is not None and down is not None
    torch.manual_seed(0)
    numbers = {each: torch.randn(matrix.codes.shape).to(BF16) for each, matrix in matrices(SHAPE, gate_up, down).items()}
    layer = Experts(NAMES, SHAPE, select_experts_method(BF16, CPU, name)(SHAPE, NAMES), BF16, CPU)
    for expert in range(7):
        for each, slot in layer.reserve(expert).items():
            assert slot.load_codes is None
            slot.load(numbers[each])
    x, (ids, weights) = torch.randn(5, 192).to(BF16), routes(5, 3, 7)
    reference = expected(
        {each: quantize(matrix, down if each.endswith("down_proj.weight") else gate_up) for each, matrix in numbers.items()},
        x,
        ids,
        weights,
    )
    torch.testing.assert_close(
        layer.forward(x, ids, weights).float(), reference, rtol=2e-2, atol=2e-2 * reference.abs().max().item()
    )


def test_a_part_that_waits_is_forgotten_with_its_slot() -> None:
    layer = Experts(NAMES, SHAPE, QuantizedExperts(INT8, INT8, online=True), BF16, CPU)
    gate, up = torch.randn(2, 64, 192).to(BF16)
    layer.reserve(0)[NAMES.weight(0, "gate")].load(gate)
    layer.drop(0)
    layer.reserve(1)[NAMES.weight(1, "up")].load(up)
    assert isinstance(layer.method, QuantizedExperts)
    assert not layer.has(1) and layer.method._waiting.keys() == {(0, "up")}


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        (ExpertsShape(7, 7, 192, Share.all(48)), {}),
        (SHAPE, {NAMES.weight(2, "up"): INT8}),
        (SHAPE, {NAMES.weight(2, "down"): None}),
    ],
    ids=["part of a group", "other forms", "not quantized"],
)
def test_what_kernels_cannot_multiply_is_dequantized(
    shape: ExpertsShape, change: dict[str, Format | None], caplog: pytest.LogCaptureFixture
) -> None:
    forms = dict.fromkeys(matrices(SHAPE, INT4, INT4), INT4)
    stored = {name: form for name, form in {**forms, **change}.items() if form is not None}
    assert select_experts_method(BF16, CPU, None, stored)(shape, NAMES).name == "native"
    assert any(line.startswith("dequantized, since") and "mlp.experts" in line for line in caplog.messages)
    assert select_experts_method(torch.float32, CPU, None, forms)(SHAPE, NAMES).name == "dense"


def test_what_cannot_be_quantized_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"int4 is not possible for experts \(48 x 192 on a rank\)") as caught:
        select_experts_method(BF16, CPU, "int4")(ExpertsShape(7, 7, 192, Share.all(48)), NAMES)
    assert caught.value.field == "quantization"
