"""Products with matrices in 2 to 8 bits on a GPU: those of the dequantized matrix, in every format."""

from dataclasses import replace

import pytest
import torch
from starling_engine.kernels import grouped
from starling_engine.kernels.coded_weight import dequantized_rows, element_bytes, pack_codes
from starling_engine.kernels.quantized_linear import quantized_linear
from starling_engine.kernels.rounded_rows import RowRounding, rounded_in_torch
from starling_engine.layers.experts import Experts, ExpertsShape
from starling_engine.layers.experts_triton import TritonQuantizedExperts
from starling_engine.layers.linear import Linear, stacked
from starling_engine.layers.linear_quantized import ONLINE, OnlineQuantizedLinear, QuantizedLinear
from starling_engine.layers.quantized_kernels import triton_kernels
from starling_engine.native.group_quantized import (
    FP8,
    INT4,
    INT8,
    Format,
    GroupQuantized,
    gather_columns,
    gathered,
    quantize,
)
from starling_engine.native.reference import silu_mul
from starling_engine.topology.shard import Shard, Share
from torch.nn import functional as F

from tests.engine.kernels import quantized_launches
from tests.engine.kernels.compiled import IN_FLIGHT, MAX_SHARED, compiled
from tests.engine.layers.test_experts import NAMES, routes
from tests.engine.layers.test_experts_quantized import FORMATS, SHAPE, matrices, of_numbers, ordered, random_matrix
from tests.engine.test_quantized_ops import KEPT

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}
ODD = {**KEPT, "4 bits by 48": Format(4, group=48, zero=8), "4 bits by 96, and minima": Format(4, group=96, minima=True)}


def rows_of(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes rows that lie apart."""
    return torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(m))[:, :k].to(dtype)


@pytest.mark.parametrize(("m", "n", "groups", "dtype"), [(1, 33, 3, FP32), (17, 70, 5, BF16), (70, 130, 2, FP16), (3, 64, 8, BF16)])
@pytest.mark.parametrize("form", ODD.values(), ids=ODD)
def test_the_product_is_that_of_the_dequantized_matrix(
    m: int, n: int, groups: int, dtype: torch.dtype, form: Format, device: torch.device
) -> None:
    """The last tile of columns is not whole, in most cases."""
    torch.manual_seed(0)
    matrix = random_matrix(n, groups * form.group, form)
    weight, x, bias = pack_codes(matrix, device), rows_of(m, groups * form.group, dtype), torch.randn(n).to(dtype)
    assert (weight.n, weight.k) == matrix.codes.shape
    assert sum(each.nbytes for each in weight.tensors) == element_bytes(form) * matrix.codes.numel()
    plain = matrix.dequantized().to(dtype).float()
    expected = F.linear(x.float(), plain, bias.float())
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * expected.abs().max().item()}
    torch.testing.assert_close(quantized_linear(x.to(device), weight, bias.to(device)).cpu().float(), expected, **close)
    wide = torch.zeros(m, n + 8, dtype=FP32, device=device)
    out = quantized_linear(x.to(device), weight, None, FP32, wide[:, 4:-4])
    torch.testing.assert_close(out.cpu(), F.linear(x.float(), plain), rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert not wide[:, :4].any() and not wide[:, -4:].any()
    ids = torch.tensor([n - 1, 0, 5], device=device)
    assert torch.equal(dequantized_rows(ids, weight, dtype).cpu(), matrix.dequantized().to(dtype)[ids.cpu()])


def test_every_float_of_8_bits_is_exact(device: torch.device) -> None:
    """Numbers that are not are left out: a checkpoint that has them is refused."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    codes = F.pad(codes, (0, 2)).view(1, 256).expand(2, -1).contiguous()
    weight = pack_codes(GroupQuantized(codes, torch.ones(2, 4), FP8), device)
    found = quantized_linear(torch.eye(256, device=device), weight)
    assert torch.equal(found[:, 0].cpu(), codes[0].view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ONLINE)
def test_layers_quantize_while_they_are_loaded(name: str, device: torch.device) -> None:
    """In fp8 rows are rounded by token."""
    torch.manual_seed(0)
    shape = stacked(["gate", "up"], [24, 24], 256, bias=True, gated=True)
    kernels = triton_kernels(BF16, device)
    layer = Linear(shape, OnlineQuantizedLinear(name, ONLINE[name], kernels), BF16, device)
    tensors = {each: torch.randn(slot.local_shape).to(BF16) for each, slot in layer.weight_slots().items()}
    for each, slot in layer.weight_slots().items():
        slot.load(tensors[each])
    weight = quantize(torch.cat([tensors["gate.weight"], tensors["up.weight"]]), ONLINE[name]).dequantized().to(BF16)
    bias, x = torch.cat([tensors["gate.bias"], tensors["up.bias"]]), rows_of(5, 256, BF16)
    seen = rounded_in_torch(x, RowRounding("token")).numbers() if name == "fp8" else x.float()
    expected = silu_mul(F.linear(seen, weight.float(), bias.float()))
    found = layer.forward(x.to(device)).cpu()
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_a_layer_of_several_formats_is_loaded_as_codes(device: torch.device) -> None:
    torch.manual_seed(0)
    forms = [INT4, INT4, Format(6, 16, zero=32)]
    shape = stacked(["q", "k", "v"], [64, 32, 32], 192)
    layer = Linear(shape, QuantizedLinear(forms, triton_kernels(BF16, device)), BF16, device)
    parts = [random_matrix(*slot.local_shape, form) for slot, form in zip(layer.weight_slots().values(), forms, strict=True)]
    for slot, matrix in zip(layer.weight_slots().values(), parts, strict=True):
        assert slot.load_codes is not None
        slot.load_codes(matrix)
    x = rows_of(3, 192, BF16)
    expected = torch.cat([F.linear(x.float(), each.dequantized().to(BF16).float()) for each in parts], 1)
    found = layer.forward(x.to(device), FP32).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_columns_in_another_order(device: torch.device) -> None:
    torch.manual_seed(0)
    gathers, group_of = Format(4, 32, minima=True, gathered=192), torch.randperm(192) % 7
    layer = Linear(stacked(["o"], [48], 192), QuantizedLinear([gathers], triton_kernels(BF16, device)), BF16, device)
    plain = random_matrix(48, 7 * 32, replace(gathers, gathered=0))
    matrix = gathered(plain.codes[:, :192], plain.scales, plain.minima, group_of, gathers)
    (slot,) = layer.weight_slots().values()
    assert slot.load_codes is not None and matrix.order is not None and matrix.codes.shape == (48, 224)
    slot.load_codes(matrix)
    x = rows_of(3, 192, BF16)
    rows = triton_kernels(BF16, device).gather(x.to(device), matrix.order.to(device))
    assert torch.equal(rows.cpu(), gather_columns(x, matrix.order))
    expected = F.linear(x.float(), matrix.dequantized().to(BF16).float())
    found = layer.forward(x.to(device), FP32).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


FEW = ("int4", "as Q4_K_M")
"""Formats that every run has with two rows of bfloat16 and with many; each other one has a row of float32."""


@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        *((name, 1, FP32) for name in FORMATS),
        *(pytest.param(name, count, BF16, marks=() if name in FEW else pytest.mark.whole) for name in FORMATS for count in (2, 90)),
    ],
)
def test_experts_give_what_their_dequantized_matrices_give(
    name: str, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = ExpertsShape(num_experts=7, num_slots=5, hidden_size=192, intermediate=Share.all(64))
    source = matrices(shape, *FORMATS[name])
    layer = Experts(NAMES, shape, TritonQuantizedExperts(*FORMATS[name], online=False), dtype, device)
    for expert in range(5):
        for part, slot in layer.reserve(expert).items():
            assert slot.load_codes is not None
            slot.load_codes(source[part])
    assert layer.bytes_each == sum(slot.held_bytes(2) for slot in layer.reserve(0).values())
    x, (ids, weights) = rows_of(tokens, 192, dtype), routes(tokens, 3, 7)
    plain = {part: matrix.dequantized().to(dtype) for part, matrix in source.items()}
    expected = torch.zeros(tokens, 192)
    for expert in range(5):
        token, which = (ids == expert).nonzero(as_tuple=True)
        gate, up, down = (plain[NAMES.weight(expert, each)].float() for each in ("gate", "up", "down"))
        activated = F.silu(x[token].float() @ gate.T) * (x[token].float() @ up.T)
        expected.index_add_(0, token, activated @ down.T * weights[token, which][:, None])
    found = layer.forward(x.to(device), ids.to(device), weights.to(device)).cpu().float()
    close = 2e-2 if dtype == BF16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=close, atol=close * expected.abs().max().item())


@pytest.mark.parametrize(("tokens", "dtype"), [(1, FP32), (21, BF16)])
def test_experts_gather_columns(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each expert has its columns in an order of its own, and two of seven are elsewhere."""
    source = ordered(SHAPE, minima=True)
    forms = (source[NAMES.weight(0, each)].format for each in ("gate", "down"))
    layer = Experts(NAMES, replace(SHAPE, num_slots=5), TritonQuantizedExperts(*forms, online=False), dtype, device)
    for expert in range(5):
        for part, slot in layer.reserve(expert).items():
            assert slot.load_codes is not None
            slot.load_codes(source[part])
    x, (ids, weights) = rows_of(tokens, 192, dtype), routes(tokens, 3, 7)
    expected = of_numbers(source, x, ids, weights * (ids < 5))
    found = layer.forward(x.to(device), ids.to(device), weights.to(device)).cpu().float()
    close = 2e-2 if dtype == BF16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=close, atol=close * expected.abs().max().item())


def test_ranks_with_a_part_of_each_expert_add_up(device: torch.device) -> None:
    """Nothing is added by tokens that are not there, or experts that are not."""
    whole, form = ExpertsShape(6, 6, 64, Share.all(64)), Format(4, group=16, zero=8)
    source = matrices(whole, form, form)
    layers = []
    for intermediate in (Share.all(64), Shard(0, 2).of(64), Shard(1, 2).of(64)):
        shape = ExpertsShape(6, 6, 64, intermediate)
        layers.append(Experts(NAMES, shape, TritonQuantizedExperts(form, form, online=False), FP32, device))
        x, ids, weights = rows_of(5, 64, FP32), *routes(5, 2, 6)
        given = x.to(device), ids.to(device), weights.to(device)
        assert not layers[-1].forward(*given).any()
        for expert in range(6):
            for part, slot in layers[-1].reserve(expert).items():
                assert slot.load_codes is not None
                rows, columns = (*slot.part, slice(None), slice(None))[:2]
                matrix = source[part]
                slot.load_codes(GroupQuantized(matrix.codes[rows], matrix.scales[rows], form).columns(columns))
        assert layers[-1].forward(given[0][:0], given[1][:0], given[2][:0]).shape == (0, 64)
    one, *parts = (layer.forward(*given) for layer in layers)
    torch.testing.assert_close(parts[0] + parts[1], one, rtol=1e-4, atol=1e-4 * one.abs().max().item())


def test_tiles_of_codes_hold_whole_groups() -> None:
    for dtype, tokens in ((BF16, 1), (BF16, 512), (BF16, 8192), (FP32, 8)):
        tiles = grouped.tiles_for(tokens, 8, 128, dtype, coded=True)
        assert tiles.gate_up.depth % 32 == tiles.down.depth % 32 == 0


COMPILED = [INT4, INT8, FP8, ONLINE["int8"], Format(4, group=16, zero=8), KEPT["4 bits by a table"], KEPT["4 bits and minima"]]


@pytest.mark.parametrize(
    ("rows", "form", "dtype"),
    [
        *((rows, form, BF16) for rows in (1, 64, 4096) for form in COMPILED),
        (1, INT4, FP32),
        (1, ONLINE["int8"], FP32),
        (1, FP8, FP16),
    ],
    ids=str,
)
def test_compiles_without_spills(rows: int, form: Format, dtype: torch.dtype) -> None:
    (kernel,) = compiled(quantized_launches.linear, rows, form, dtype)
    assert kernel.stack == 0 and kernel.shared <= MAX_SHARED
    assert ("wgmma.mma_async" in kernel.ptx) == (rows > 16)
    # Memory is the limit of few rows, but not of fp32, which has no tensor cores.
    assert kernel.in_flight >= IN_FLIGHT or rows > 64 or dtype == FP32


@pytest.mark.parametrize(
    ("tokens", "form", "dtype"),
    [(1, INT4, BF16), (4096, INT4, BF16), (64, ONLINE["int8"], BF16), (8, ONLINE["int8"], FP32)],
    ids=str,
)
def test_experts_compile_without_spills(tokens: int, form: Format, dtype: torch.dtype) -> None:
    for kernel in compiled(quantized_launches.experts, tokens, form, dtype):
        assert kernel.stack == 0 and kernel.shared <= MAX_SHARED, kernel.name


def test_the_gather_compiles_for_an_h200() -> None:
    assert [kernel.stack for kernel in compiled(quantized_launches.gather)] == [0, 0]
