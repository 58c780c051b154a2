"""The kernels for matrices in 2 to 8 bits against their reference, on each instruction set that this machine can run."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from starling_engine.gguf.reader import BLOCK_TYPES, BlockType
from starling_engine.native import group_quantized as reference
from starling_engine.native import load
from starling_engine.native import quantized_ops as ops
from starling_engine.native.gguf_blocks import FORMATS, read_blocks
from starling_engine.native.group_quantized import INT4, INT8, Format, GroupQuantized, quantize
from starling_engine.native.quantized_ops import PackedQuantized
from starling_engine.native.recording import Scratch, record

from tests.engine.instruction_sets import ROWS_BY_REGISTERS, every_set, multiplies_by_tiles, unpacked_by_tiles, using

pytestmark = [
    pytest.mark.skipif(load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(120),
]

BF16, FP32 = torch.bfloat16, torch.float32
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)
KEPT = {
    "int8": INT8,
    "int4": INT4,
    "4 bits and minima": Format(4, minima=True),
    "4 bits by a table": Format(4, table=TABLE),
    "4 bits by 16": Format(4, group=16, zero=4),
    "4 bits by 16, by a table": Format(4, group=16, table=TABLE),
    "5 bits": Format(5, zero=16),
    "5 bits and minima": Format(5, minima=True),
    "6 bits by 16": Format(6, group=16, zero=32),
    "2 bits by 16, and minima": Format(2, group=16, minima=True),
    "int8 by 64": Format(8, group=64, zero=128),
    "4 bits by 64, and minima": Format(4, group=64, minima=True),
    "4 bits by 128": Format(4, group=128, zero=8),
    "8 bits by 256, and minima": Format(8, group=256, zero=128, minima=True),
    "6 bits by 32": Format(6, group=32, zero=32),
    "fp8 by 32": Format(8, group=32, floats=True),
    "fp8 by 16": Format(8, group=16, floats=True),
}
every_format = pytest.mark.parametrize("form", KEPT.values(), ids=KEPT)
SIZES = [(0, 48, 64), (1, 16, 32), (1, 100, 1024), (3, 50, 96), (5, 33, 64), (8, 48, 4096), (37, 130, 320)]


@pytest.fixture(autouse=True, scope="module", params=every_set())
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def test_columns_are_gathered() -> None:
    x, order = torch.randn(5, 140).bfloat16()[:, 8:], torch.randint(132, (150,), dtype=torch.int32)
    order[::7] = reference.NO_COLUMN
    assert torch.equal(ops.gather_columns(x, order), reference.gather_columns(x, order))
    recorded, found = record(lambda: ops.gather_columns(x, order), Scratch(1 << 12))
    x += 1
    recorded.replay()
    assert torch.equal(found, reference.gather_columns(x, order))


@pytest.mark.parametrize("by_token", [False, True])
def test_columns_of_pairs_are_gathered(by_token: bool) -> None:
    """Slots 1 and 4 have no pairs, and the first two of four pairs of slot 2 are of one token."""
    starts, x = torch.tensor([0, 3, 3, 7, 9, 9]), torch.randn(9, 140).bfloat16()[:, 8:]
    orders = torch.randint(-1, 132, (5, 150), dtype=torch.int32)
    tokens = torch.tensor([4, 0, 8, 1, 1, 3, 2, 8, 0]) if by_token else None
    recorded, (found, places) = record(lambda: ops.gather_columns_of_pairs(x, tokens, starts, orders, 9), Scratch(1 << 13))
    slots = torch.arange(5).repeat_interleave(starts.diff())
    rows = torch.arange(9) if tokens is None else tokens
    for _ in range(2):
        expected = [reference.gather_columns(x[row : row + 1], orders[slot]) for row, slot in zip(rows, slots, strict=True)]
        assert torch.equal(found, torch.cat(expected)) and torch.equal(places, torch.arange(9))
        x += 1
        recorded.replay()


def groups_of(k: int, form: Format) -> int:
    """Returns the columns of whole groups that k columns need."""
    return -(-k // form.group) * form.group


def matrix(n: int, k: int, form: Format) -> GroupQuantized:
    """Makes a matrix that uses every code."""
    codes = torch.randint(0, 2**form.bits, (n, k), dtype=torch.uint8)
    if form.floats:
        codes -= (codes & 0x7F == 0x7F).to(torch.uint8)  # not a number
    scales = (torch.rand(n, k // form.group).half() * 0.1).to(form.scale_dtype)
    return GroupQuantized(codes, scales, form, torch.randn(n, k // form.group).half() if form.minima else None)


def product(m: int, k: int, form: Format) -> Callable[..., torch.Tensor]:
    """Returns the reference of m rows of k columns. Tiles of bfloat16 take numbers, where all else takes rows in 8 bits."""
    return reference.unpacked_linear if unpacked_by_tiles(m, k, form) else reference.quantized_linear


@pytest.mark.parametrize(("out_dtype", "bias"), [(BF16, False), (FP32, True)])
@every_format
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_a_linear(m: int, n: int, k: int, form: Format, *, bias: bool, out_dtype: torch.dtype) -> None:
    k = groups_of(k, form)
    x, weight, b = torch.randn(m, k).to(BF16), matrix(n, k, form), torch.randn(n).to(BF16) if bias else None
    actual = ops.quantized_linear(x, ops.pack_quantized(weight), b, out_dtype)
    expected = product(m, k, form)(x, weight, b, out_dtype)
    largest = expected.abs().max().item() if m else 0.0
    torch.testing.assert_close(actual, expected, rtol=1e-2 if out_dtype == BF16 else 1e-5, atol=2e-5 * largest)


@pytest.mark.parametrize("group", [32, 4160])
def test_rows_by_fp8_of_many_columns_do_not_depend_on_others(group: int) -> None:
    """The first rows of many turn codes into bf16, which the others take, half of the columns at a time."""
    if multiplies_by_tiles():
        pytest.skip("tiles add up in another order than registers, and take codes times scales in bfloat16")
    x, weight = torch.randn(23, 4160).to(BF16), matrix(50, 4160, Format(8, group=group, floats=True))
    packed = ops.pack_quantized(weight)
    actual = ops.quantized_linear(x, packed, out_dtype=FP32)
    # An emulator has to be told a copy's addresses again.
    alone = [ops.quantized_linear(row, replace(packed), out_dtype=FP32) for row in x.split(1)]
    assert torch.equal(actual, torch.cat(alone))
    expected = reference.quantized_linear(x, weight, out_dtype=FP32)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item())


BY_128 = {name: replace(form, group=128) for name, form in KEPT.items() if form.group <= 32 and not form.floats}


@pytest.mark.parametrize("form", BY_128.values(), ids=BY_128)
def test_in_groups_of_128_a_row_does_not_depend_on_others(form: Format) -> None:
    """Sums are whole numbers, and scaled in the same order by instructions for many rows: tiles of AMX, matrices on arm64."""
    x, weight = torch.randn(69, 1152).to(BF16), matrix(50, 1152, form)
    packed = ops.pack_quantized(weight)
    actual = ops.quantized_linear(x, packed, out_dtype=FP32)
    chosen = [0, 15, 16, 63, 68]
    alone = [ops.quantized_linear(x[row : row + 1], replace(packed), out_dtype=FP32) for row in chosen]
    assert torch.equal(actual[chosen], torch.cat(alone))
    expected = reference.quantized_linear(x[:33], weight, out_dtype=FP32)
    torch.testing.assert_close(actual[:33], expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item())


@every_format
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 32), (9, 112, 320), (2, 48, 64)])
def test_a_gated_linear(m: int, n: int, k: int, form: Format) -> None:
    k = groups_of(k, form)
    x, weight, b = torch.randn(m, k).to(BF16), matrix(n, k, form), torch.randn(n).to(BF16)
    actual = ops.quantized_linear(x, ops.pack_quantized(weight, gated=True), b, FP32)
    expected = product(m, k, form)(x, weight, b, FP32, gated=True)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def packed_experts(count: int, n: int, k: int, form: Format, *, gated: bool = False) -> PackedQuantized:
    packed = ops.empty_quantized_experts(count, n, k, form, gated=gated)
    for index in range(count):
        ops.pack_quantized_expert(matrix(n, k, form), packed, index)
    return packed


def linear_of_run(x: torch.Tensor, experts: PackedQuantized, expert: int, out_dtype: torch.dtype = BF16) -> torch.Tensor:
    """Multiplies an expert's rows, few at a time unless there is another order of sums for many."""
    at_once = len(x) if unpacked_by_tiles(*x.shape, experts.format) else ROWS_BY_REGISTERS
    return torch.cat([ops.quantized_linear(rows, experts.expert(expert), out_dtype=out_dtype) for rows in x.split(at_once)])


PAIRS = [[0, 0], [1], [3, 0, 1, 70], [0, 2, 0], [9, 9, 9, 9, 9, 9]]


@every_format
@pytest.mark.parametrize("counts", PAIRS, ids=str)
@pytest.mark.parametrize(("n", "gated"), [(112, True), (50, False)])
def test_experts(n: int, counts: list[int], form: Format, *, gated: bool) -> None:
    """The same sums as one linear for each expert, to the bit."""
    pairs, num_tokens, k = sum(counts), max(5, sum(counts) // 3), groups_of(192, form)
    packed = packed_experts(len(counts), n, k, form, gated=gated)
    x, tokens, starts = torch.randn(num_tokens, 2 * k).to(BF16)[:, k:], torch.randint(0, num_tokens, (pairs,)), _starts(counts)
    actual = ops.grouped_quantized_linear(x, tokens, starts, packed)
    each = [linear_of_run(piece, packed, e) for e, piece in enumerate(x[tokens].split(counts))]
    assert torch.equal(actual, torch.cat(each)) and actual.shape == (pairs, packed.width)


@every_format
@pytest.mark.parametrize("counts", PAIRS, ids=str)
def test_a_sum_of_experts(counts: list[int], form: Format) -> None:
    pairs, num_tokens, n, k = sum(counts), max(5, *counts), 100, groups_of(192, form)
    packed = packed_experts(len(counts), n, k, form)
    x, weights = torch.randn(pairs, k).to(BF16), torch.rand(pairs)
    # A token goes to an expert once at most, and some go nowhere.
    tokens = torch.cat([torch.randperm(num_tokens)[:count] for count in counts])
    actual = ops.grouped_quantized_sum(x, tokens, weights, _starts(counts), packed, num_tokens)
    each = [linear_of_run(piece, packed, e, FP32) for e, piece in enumerate(x.split(counts))]
    expected = torch.zeros(num_tokens, n).index_add_(0, tokens, torch.cat(each) * weights[:, None])
    torch.testing.assert_close(actual.float(), expected, rtol=1e-2, atol=1e-5 * expected.abs().max().item())


def _starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def test_rows_may_be_strided_and_of_any_size() -> None:
    whole = torch.randn(4, 192).to(BF16) * torch.tensor([0.0, 1e-30, 1.0, 1e30])[:, None].to(BF16)
    x, weight = whole[:, 32:128], matrix(20, 96, INT8)
    actual = ops.quantized_linear(x, ops.pack_quantized(weight), out_dtype=FP32)
    expected = reference.quantized_linear(x, weight, out_dtype=FP32)
    assert not actual[0].any() and actual.isfinite().all()
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_what_is_not_a_number_shows_it(broken: float) -> None:
    x = torch.randn(3, 64).to(BF16)
    x[1, 40] = broken
    out = ops.quantized_linear(x, ops.pack_quantized(matrix(16, 64, INT4)), out_dtype=FP32)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@every_format
def test_an_embedding_is_the_row(form: Format) -> None:
    weight, ids = matrix(100, groups_of(192, form), form), torch.tensor([99, 0, 15, 16, 99])
    torch.testing.assert_close(ops.embedding_quantized(ids, ops.pack_quantized(weight)), weight.dequantized()[ids].to(BF16))


@pytest.mark.parametrize("block", [block for block in BLOCK_TYPES.values() if block.name in FORMATS], ids=lambda block: block.name)
def test_rows_of_a_gguf_file(block: BlockType) -> None:
    """Any bytes are codes; halves of scales that are no numbers are left out, since those compare as different."""
    raw = torch.randint(0, 256, (5, 2 * block.size * (256 // block.elements)), dtype=torch.uint8)
    raw &= 0xBF  # no half is infinite, and no power of MXFP4 too large
    actual, expected = ops.read_gguf(raw, block), read_blocks(raw, block)
    assert actual.format == expected.format and torch.equal(actual.codes, expected.codes)
    assert torch.equal(actual.scales, expected.scales)
    assert (actual.minima is None) == (expected.minima is None)
    if actual.minima is not None and expected.minima is not None:
        assert torch.equal(actual.minima, expected.minima)


@pytest.mark.parametrize(("form", "bound"), [(INT8, 1 / 254), (INT4, 1 / 8)])
def test_quantizing_is_off_by_half_a_step_at_most(form: Format, bound: float) -> None:
    """With 4 bits the largest number of the other sign is clamped: by a whole step."""
    weight = torch.randn(64, 256)
    weight[3, 32:64] = 0
    error = (quantize(weight, form).dequantized() - weight).unflatten(1, (-1, form.group))
    largest = weight.unflatten(1, (-1, form.group)).abs().amax(2, keepdim=True)
    assert (error.abs() <= largest * bound * 1.01).all()
    assert torch.equal(quantize(weight, form).dequantized()[3, 32:64], torch.zeros(32))
