"""Products of rows and matrices in FP8: those of the rounded numbers, whatever kernel makes them."""

from dataclasses import replace

import pytest
import torch
from starling_engine.kernels import scaled_linear as module
from starling_engine.kernels.activation import silu_mul, silu_mul_rounded
from starling_engine.kernels.fp8 import product_of, rounds, scaled_bytes
from starling_engine.kernels.norm import add_rms_norm, rms_norm, rms_norm_rounded
from starling_engine.kernels.round_rows import round_rows
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding, rounded_in_torch
from starling_engine.kernels.scaled_linear import scaled_linear
from starling_engine.kernels.scaled_weight import pack_scaled, scaled_numbers
from starling_engine.layers.experts import Experts, ExpertsShape
from starling_engine.layers.experts_triton import TritonScaledExperts
from starling_engine.native.group_quantized import INT8, Format, GroupQuantized, stacked
from starling_engine.topology.shard import Share
from torch.nn import functional as F

from tests.engine.kernels import quantized_launches
from tests.engine.kernels.compiled import IN_FLIGHT, compiled
from tests.engine.layers.test_experts import NAMES, routes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}

BY_ROW = Format(8, 128, floats=True, by_row=True, rounding="token")
FORMS = {
    "by row, by token": BY_ROW,
    "by row, static": replace(BY_ROW, rounding="static"),
    "by row, by group": replace(BY_ROW, rounding="group"),
    "by block, by group": Format(8, 128, floats=True, block_rows=128, rounding="group"),
    "by block, by token": Format(8, 128, floats=True, block_rows=128, rounding="token"),
    "by group of a row": Format(8, 128, floats=True, rounding="group"),
    "by short groups of one scale": replace(BY_ROW, group=16),
}
SIZES = [(1, 33, 384, BF16), (17, 256, 256, BF16), (70, 128, 384, BF16), (66, 40, 128, FP16)]
ROUNDINGS = {"token": RowRounding("token"), "group": RowRounding("group"), "static": RowRounding("static", torch.tensor(0.004))}
every_rounding = pytest.mark.parametrize("kind", ROUNDINGS)


def fp8_matrix(n: int, k: int, form: Format, *, one_scale: bool = False) -> GroupQuantized:
    """Makes codes of all magnitudes, and scales as the format has them."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    codes -= (codes & 0x7F == 0x7F).to(torch.uint8)  # not a number
    shape = (1, 1) if one_scale else (n, 1) if form.by_row else (-(-n // form.block_rows), k // form.group)
    scales = (torch.rand(shape) / 100 + 0.001).repeat_interleave(form.block_rows, 0)[:n].expand(n, k // form.group).contiguous()
    static = torch.tensor(0.01) if form.rounding == "static" else None
    return GroupQuantized(codes, scales, form, input_scale=static)


def on(device: torch.device, rounding: RowRounding) -> RowRounding:
    return replace(rounding, scale=None if rounding.scale is None else rounding.scale.to(device))


def rows_of(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes rows of many magnitudes that lie apart; one of them is zeros."""
    x = torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(m)) * torch.logspace(-3, 1, m)[:, None]
    x[m // 2] = 0
    return x.to(dtype)[:, :k]


def assert_rounded(found: RoundedRows, expected: RoundedRows) -> None:
    assert torch.equal(found.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), expected.scales) and found.dtype == expected.dtype


@every_rounding
@pytest.mark.parametrize(("m", "k", "dtype"), [(1, 384, BF16), (9, 1152, BF16), (6, 128, FP32), (3, 640, FP16)])
def test_rows_are_rounded_as_torch_does(m: int, k: int, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    x, rounding = rows_of(m, k, dtype), ROUNDINGS[kind]
    expected = rounded_in_torch(x, rounding)
    assert_rounded(round_rows(x.to(device), on(device, rounding)), expected)
    if kind != "static":
        wrong = (expected.numbers() - x.float()).abs()
        largest = expected.scales.repeat_interleave(k // expected.scales.shape[1], 1) * 448
        assert (wrong <= torch.maximum(x.float().abs() / 16, largest / 448 / 2**10)).all()  # half a step, of the smallest at least


def test_what_is_beyond_a_static_scale_is_held_and_what_is_no_number_stays(device: torch.device) -> None:
    x = torch.tensor([[3.0, -900.0, float("nan"), 0.0] * 32], device=device)
    found = round_rows(x, RowRounding("static", torch.tensor(1.0, device=device))).codes.float().cpu()
    assert found[0, :2].tolist() == [3.0, -448.0] and found[0, 2].isnan() and found[0, 3] == 0
    for kind in ("token", "group"):
        rounded = round_rows(x, RowRounding(kind))
        assert rounded.numbers()[0, 2].isnan()


@every_rounding
def test_norms_and_gates_round_what_they_give(kind: str, device: torch.device) -> None:
    rounding = on(device, ROUNDINGS[kind])
    x, residual, weight = (
        rows_of(5, 640, BF16).contiguous().to(device),
        torch.randn(5, 640).to(BF16).to(device),
        torch.rand(640).to(BF16).to(device),
    )
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-6, out)
    assert_rounded(rms_norm_rounded(x, None, weight, 1e-6, rounding), rounded_in_torch(out.cpu(), ROUNDINGS[kind]))
    total = residual.clone()
    add_rms_norm(x, total, weight, 1e-6, out)
    assert_rounded(rms_norm_rounded(x, residual, weight, 1e-6, rounding), rounded_in_torch(out.cpu(), ROUNDINGS[kind]))
    assert torch.equal(residual, total)
    both = torch.randn(5, 768).to(BF16).to(device)
    assert_rounded(silu_mul_rounded(both, rounding), rounded_in_torch(silu_mul(both).cpu(), ROUNDINGS[kind]))


@pytest.mark.parametrize(("m", "n", "k", "dtype"), SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_the_product_is_that_of_the_rounded_numbers(
    m: int, n: int, k: int, dtype: torch.dtype, name: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    form = FORMS[name]
    matrix, x, bias = fp8_matrix(n, k, form), rows_of(m, k, dtype), torch.randn(n).to(dtype)
    weight = pack_scaled(matrix, device)
    assert weight.block_rows == (0 if form.by_row else 128 if form.block_rows == 128 and n % 128 == 0 else 1)
    rounded = rounded_in_torch(x, RowRounding(form.rounding, matrix.input_scale)).numbers()
    plain = F.linear(rounded, matrix.dequantized())
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * plain.abs().max().item()}
    found = scaled_linear(x.to(device), weight, bias.to(device)).cpu()
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), plain + bias.float(), **close)
    wide = torch.zeros(m, n + 8, dtype=FP32, device=device)
    out = scaled_linear(x.to(device), weight, None, None, wide[:, 4:-4])
    torch.testing.assert_close(out.cpu(), plain, rtol=1e-5, atol=2e-5 * plain.abs().max().item())
    assert not wide[:, :4].any() and not wide[:, -4:].any()
    ids = torch.tensor([n - 1, 0, 5], device=device)
    assert torch.equal(scaled_numbers(ids, weight, dtype).cpu(), matrix.dequantized().to(dtype)[ids.cpu()])


@pytest.mark.parametrize(
    ("name", "one_scale", "m", "expected"),
    [
        ("by row, by token", False, 70, [(64, 1)]),
        ("by row, static", True, 70, [()]),
        ("by row, static", False, 70, [(64, 1)]),
        ("by row, by token", False, 64, []),
        ("by block, by group", False, 70, []),
    ],
)
def test_torch_multiplies_many_rows(
    name: str, one_scale: bool, m: int, expected: list[tuple[int, ...]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come rounded: none is rounded again."""
    torch.manual_seed(0)
    matrix, x, calls = fp8_matrix(128, 256, FORMS[name], one_scale=one_scale), rows_of(m, 256, BF16), []
    theirs = torch._scaled_mm

    def spied(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor, **more: object) -> torch.Tensor:
        calls.append(tuple(scale.shape) and (64, *scale.shape[1:]))
        return theirs(left, right, scale, *rest, **more)

    weight = pack_scaled(matrix, device)
    rounded = round_rows(x.to(device), weight.rounding)
    monkeypatch.setattr(torch, "_scaled_mm", spied)
    monkeypatch.setattr(module, "round_rows", None)
    found = scaled_linear(rounded, weight).cpu().float()
    plain = F.linear(rounded_in_torch(x, RowRounding(weight.rounding.kind, matrix.input_scale)).numbers(), matrix.dequantized())
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=1e-2 * plain.abs().max().item())
    assert calls == expected


OLD, ADA, HOPPER = 80, 89, 90


@pytest.mark.parametrize(
    ("form", "size", "rows", "dtypes", "capability", "one_scale", "expected"),
    [
        (BY_ROW, (4096, 4096), 4096, (BF16, BF16), HOPPER, False, "by row"),
        (BY_ROW, (4096, 4096), 65, (BF16, BF16), ADA, False, "by row"),
        (BY_ROW, (4096, 4096), 64, (BF16, BF16), HOPPER, False, "triton"),  # bytes of weights alone count
        (BY_ROW, (4096, 4096), 4096, (BF16, FP32), HOPPER, False, "triton"),  # CUTLASS writes bfloat16
        (BY_ROW, (4096, 4096), 4096, (FP16, FP16), HOPPER, False, "triton"),
        (BY_ROW, (4096, 4090), 4096, (BF16, BF16), HOPPER, False, "triton"),
        (BY_ROW, (4090, 4096), 4096, (BF16, BF16), HOPPER, False, "triton"),
        (FORMS["by row, static"], (4096, 4096), 4096, (BF16, BF16), HOPPER, True, "by tensor"),
        (FORMS["by row, static"], (4096, 4096), 4096, (FP16, FP16), ADA, True, "by tensor"),
        (FORMS["by row, static"], (6144, 4096), 4096, (BF16, BF16), HOPPER, False, "by row"),  # q, k and v have a scale each
        (FORMS["by row, static"], (6144, 4096), 1, (BF16, BF16), HOPPER, True, "triton"),
        (BY_ROW, (4096, 4096), 4096, (BF16, BF16), HOPPER, True, "by row"),
        (FORMS["by block, by group"], (4096, 4096), 4096, (BF16, BF16), HOPPER, False, "triton"),
        (FORMS["by row, by group"], (4096, 4096), 4096, (BF16, BF16), HOPPER, False, "triton"),
        (replace(BY_ROW, group=64), (4096, 4160), 4096, (BF16, BF16), HOPPER, False, "by row"),
        (replace(BY_ROW, group=64, rounding="group"), (4096, 4160), 1, (BF16, BF16), HOPPER, False, "numbers"),
        (Format(8, 64, floats=True, rounding="token"), (4096, 4160), 1, (BF16, BF16), HOPPER, False, "numbers"),
        (replace(BY_ROW, rounding=""), (4096, 4096), 1, (BF16, BF16), HOPPER, False, "numbers"),
        (BY_ROW, (4096, 4096), 4096, (BF16, BF16), OLD, False, "numbers"),
        (BY_ROW, (4096, 4096), 4096, (FP32, FP32), HOPPER, False, "numbers"),
        (INT8, (4096, 4096), 4096, (BF16, BF16), HOPPER, False, "numbers"),
    ],
)
def test_one_function_chooses_the_product(
    form: Format,
    size: tuple[int, int],
    rows: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    capability: int,
    one_scale: bool,
    expected: str,
) -> None:
    assert product_of(form, *size, rows, *dtypes, capability, one_scale=one_scale) == expected
    assert rounds(form, dtypes[0], capability) == (expected != "numbers")


def test_matrices_side_by_side_have_the_largest_static_scale(device: torch.device) -> None:
    form = FORMS["by row, static"]
    parts = [replace(fp8_matrix(16, 128, form, one_scale=True), input_scale=torch.tensor(each)) for each in (0.5, 0.75, 0.25)]
    weight = pack_scaled(stacked(parts), device)
    assert weight.rounding.scale is not None and weight.rounding.scale.item() == 0.75 and not weight.one_scale
    assert pack_scaled(parts[0], device).one_scale


@pytest.mark.parametrize("name", FORMS)
def test_memory_is_what_the_ledger_says(name: str) -> None:
    form = FORMS[name]
    weight = pack_scaled(fp8_matrix(256, 384, form), torch.device("cpu"))
    of_rows = 4 * 256 if form.by_row else 0
    assert sum(each.nbytes for each in weight.tensors) == scaled_bytes(form) * 256 * 384 + of_rows


def test_a_block_that_does_not_begin_at_the_first_row_is_kept_by_rows() -> None:
    """As of ranks that have 64 rows each, or of a matrix behind one of 64 rows."""
    matrix = fp8_matrix(256, 256, FORMS["by block, by group"])
    part = matrix.rows(torch.arange(64, 192))
    weight = pack_scaled(part, torch.device("cpu"))
    assert weight.block_rows == 1
    assert torch.equal(scaled_numbers(torch.arange(128), weight, FP32), part.dequantized())


@pytest.mark.parametrize("rows", [1, 64, 4096])
@pytest.mark.parametrize("name", ["by row, by token", "by block, by group"])
def test_compiles_without_spills(rows: int, name: str, triton: str | None) -> None:
    """Triton 3.6 keeps two words of a thread in memory for the largest tile by blocks."""
    rounding, product = compiled(quantized_launches.scaled, rows, FORMS[name])
    spilled = 8 if triton == "3.6.0" and rows == 4096 and name == "by block, by group" else 0
    assert rounding.stack == 0 and product.stack <= spilled and product.shared <= MAX_SHARED_OF_ADA
    # Hopper has FP8 for 64 rows and more; with fewer, what counts is to read the matrix.
    assert product.products == {"QGMMA" if rows >= 64 else "HMMA"} and product.in_flight >= IN_FLIGHT
    assert ("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3" in product.ptx) == (rows == 64)
    assert ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in product.ptx) == (rows == 4096)


MAX_SHARED_OF_ADA = 99 << 10


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_norms_and_gates_compile_without_spills(kind: str) -> None:
    assert all(each.stack == 0 for each in compiled(quantized_launches.rounding, kind))


@pytest.mark.parametrize("tokens", [1, 4096])
@pytest.mark.parametrize("name", ["by row, by token", "by block, by group"])
def test_experts_compile_without_spills(tokens: int, name: str) -> None:
    kernels = {each.name: each for each in compiled(quantized_launches.scaled_experts, tokens, FORMS[name])}
    assert all(each.stack == 0 and each.shared <= MAX_SHARED_OF_ADA for each in kernels.values())
    assert ("e4m3.e4m3" in kernels["_gate_up"].ptx) == (tokens > 1)


EXPERTS = [("by row, by token", 1), ("by row, static", 9), ("by block, by group", 1), ("by block, by group", 90)]


@pytest.mark.parametrize(("name", "tokens"), EXPERTS)
def test_experts_give_what_their_rounded_numbers_give(name: str, tokens: int, device: torch.device) -> None:
    """Static scales of rows are left out. What lies between the matrices is rounded, too."""
    torch.manual_seed(0)
    form, size, hidden = FORMS[name], 128, 256
    shape = ExpertsShape(num_experts=7, num_slots=5, hidden_size=hidden, intermediate=Share.all(size))
    layer = Experts(NAMES, shape, TritonScaledExperts(form, form, online=False), BF16, device)
    source = {
        NAMES.weight(expert, each): fp8_matrix(*((hidden, size) if each == "down" else (size, hidden)), form)
        for expert in range(7)
        for each in ("gate", "up", "down")
    }
    for expert in range(5):
        for part, slot in layer.reserve(expert).items():
            assert slot.load_codes is not None
            slot.load_codes(source[part])
    of_rows = 4 * (2 * size + hidden) if form.by_row else 0
    assert layer.bytes_each == of_rows + sum(slot.held_bytes(2) for slot in layer.reserve(0).values())
    x, (ids, weights) = torch.randn(tokens, hidden).to(BF16), routes(tokens, 3, 7)
    how = RowRounding("group" if form.rounding == "group" else "token")
    seen, expected = rounded_in_torch(x, how).numbers(), torch.zeros(tokens, hidden)
    for expert in range(5):
        token, which = (ids == expert).nonzero(as_tuple=True)
        gate, up, down = (source[NAMES.weight(expert, each)].dequantized() for each in ("gate", "up", "down"))
        activated = (F.silu(seen[token] @ gate.T) * (seen[token] @ up.T)).to(BF16)
        expected.index_add_(0, token, rounded_in_torch(activated, how).numbers() @ down.T * weights[token, which][:, None])
    found = layer.forward(x.to(device), ids.to(device), weights.to(device)).cpu().float()
    # A number on the border of two codes may fall on either side.
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
