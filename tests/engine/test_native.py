"""Each native kernel against its torch reference, over shapes that include the odd ones.

The file is long because each kernel has its cases here, side by side; none of them shares more than the comparison.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starling_engine.native import load, ops, reference, routing_ops
from starling_engine.native.cache_rows import cached, uncached
from starling_engine.native.reference import PackedExperts
from starling_engine.native.sampling_metadata import GREEDY, sampling_metadata
from starling_engine.params import SamplingParams
from torch import Tensor

from tests.engine.bitmasks import VOCABS, check_masks
from tests.engine.instruction_sets import every_set, multiplies_by_tiles, using
from tests.engine.slabs import assert_untouched, in_slabs

pytestmark = [
    pytest.mark.skipif(load() is None, reason="this machine has no native kernels"),
    pytest.mark.timeout(60),
]

BF16, FP32, FP8, INT8, INT4 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8


@pytest.fixture(autouse=True, scope="module", params=every_set())
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels of each instruction set that this CPU has; in a run without --whole, those of the best."""
    with using(request.param):
        yield


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 2), (1, 64, 64), (8, 96, 128), (9, 112, 4098), (130, 160, 66)])
def test_a_gated_linear(m: int, n: int, k: int, bias: bool, out_dtype: torch.dtype) -> None:
    x, weight = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16)
    b = torch.randn(n).to(BF16) if bias else None
    gate, up = (x.double() @ weight.double().T + (0.0 if b is None else b.double())).chunk(2, dim=-1)
    actual = ops.linear(x, ops.pack_linear(weight, gated=True), b, out_dtype)
    assert_close(actual, (torch.nn.functional.silu(gate) * up).to(out_dtype), 8e-3 if out_dtype == BF16 else 1e-4)
    assert_close(actual, reference.linear(x, reference.pack_linear(weight, gated=True), b, out_dtype), 1.6e-2)


@pytest.mark.parametrize(("m", "n", "k", "bias"), [(0, 8, 64, False), (1, 1, 70, True), (9, 40, 4097, False), (530, 130, 64, True)])
def test_an_exact_linear(m: int, n: int, k: int, bias: bool) -> None:
    """Every second row of a wider tensor: rows are strided."""
    x, weight, b = torch.randn(2 * m, k).to(BF16)[::2], torch.randn(n, k), torch.randn(n) if bias else None
    actual = routing_ops.exact_linear(x, routing_ops.pack_exact(weight), n, b)
    expected = x.double() @ weight.double().T + (0.0 if b is None else b.double())
    torch.testing.assert_close(actual, expected.float(), atol=2e-6 * k, rtol=0)


def test_linear_reads_strided_rows() -> None:
    x, packed = torch.randn(5, 200).to(BF16), ops.pack_linear(torch.randn(40, 64).to(BF16))
    assert torch.equal(ops.linear(x[:, 64:128], packed), ops.linear(x[:, 64:128].contiguous(), packed))


def test_without_tiles_a_row_of_a_linear_does_not_depend_on_others() -> None:
    if multiplies_by_tiles():
        pytest.skip("tiles add up in another order than registers")
    x, packed = torch.randn(41, 4196).to(BF16), ops.pack_linear(torch.randn(20, 4196).to(BF16))
    chosen = [0, 5, 6, 39, 40]
    alone = [ops.linear(x[row : row + 1], packed, None, torch.float32) for row in chosen]
    assert torch.equal(ops.linear(x, packed, None, torch.float32)[chosen], torch.cat(alone))


PAIRS = [[1], [0, 1, 0], [3, 0, 1, 8, 40], [0, 600, 9], [0, 0]]
"""Makes pairs, a given number for each expert."""


def packed_experts(count: int, n: int, k: int, gated: bool = False) -> tuple[PackedExperts, PackedExperts]:
    """The same random weights, packed and as the reference keeps them."""
    packed, plain = ops.empty_experts(count, n, k, gated=gated), reference.empty_experts(count, n, k, gated=gated)
    for index, weight in enumerate(torch.randn(count, n, k).to(BF16)):
        ops.pack_expert(weight, packed, index)
        reference.pack_expert(weight, plain, index)
    return packed, plain


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("counts", PAIRS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 2), (48, 64), (112, 70), (32, 4098)])
def test_a_grouped_linear(n: int, k: int, counts: list[int], gated: bool) -> None:
    pairs, num_tokens = sum(counts), max(5, sum(counts) // 3)
    packed, plain = packed_experts(len(counts), n, k, gated)
    x, tokens = torch.randn(num_tokens, k).to(BF16), torch.randint(0, num_tokens, (pairs,))
    starts = torch.tensor([0, *counts]).cumsum(0)
    actual = ops.grouped_linear(x, tokens, starts, packed)
    assert actual.shape == (pairs, n // 2 if gated else n)
    if pairs:
        # The same sums as one linear for each expert, to the bit.
        each = [ops.linear(piece, packed.expert(e)) for e, piece in enumerate(x[tokens].split(counts))]
        assert torch.equal(actual, torch.cat(each))
        assert_close(actual, reference.grouped_linear(x, tokens, starts, plain), 1.6e-2)


def test_a_grouped_linear_reads_strided_rows() -> None:
    packed, _ = packed_experts(2, 48, 64)
    x, tokens, starts = torch.randn(5, 200).to(BF16), torch.tensor([4, 0, 2]), torch.tensor([0, 2, 3])
    whole = ops.grouped_linear(x[:, 64:128].contiguous(), tokens, starts, packed)
    assert torch.equal(ops.grouped_linear(x[:, 64:128], tokens, starts, packed), whole)


@pytest.mark.parametrize("counts", PAIRS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 2), (48, 64), (100, 70), (32, 4098)])
def test_a_grouped_sum(n: int, k: int, counts: list[int]) -> None:
    pairs, num_tokens = sum(counts), max(5, *counts)
    packed, plain = packed_experts(len(counts), n, k)
    x, weights = torch.randn(pairs, k).to(BF16), torch.rand(pairs)
    # A token goes to an expert once at most, and some go nowhere.
    tokens = torch.cat([torch.randperm(num_tokens)[:count] for count in counts])
    starts = torch.tensor([0, *counts]).cumsum(0)
    actual = ops.grouped_sum(x, tokens, weights, starts, packed, num_tokens)
    expected = reference.grouped_sum(x, tokens, weights, starts, plain, num_tokens)
    if pairs:
        assert_close(actual, expected, 8e-3)
    else:
        assert torch.equal(actual, torch.zeros(num_tokens, n, dtype=BF16))


def test_linear_of_no_rows() -> None:
    packed = ops.pack_linear(torch.randn(40, 64).to(BF16))
    assert ops.linear(torch.empty(0, 64, dtype=BF16), packed).shape == (0, 40)


@pytest.mark.parametrize(("n", "k"), [(100, 64), (33, 130)])
def test_embedding_is_the_weight_row(n: int, k: int) -> None:
    weight, ids = torch.randn(n, k).to(BF16), torch.tensor([0, n - 1, 17, 17, 5])
    out = torch.empty(len(ids), k, dtype=BF16)
    ops.embedding_packed(ids, ops.pack_linear(weight), out)
    assert torch.equal(out, weight[ids])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_of_a_table_are_copied(dtype: torch.dtype) -> None:
    table, ids = torch.randn(40, 33).to(dtype), torch.tensor([0, 39, 17, 17])
    assert torch.equal(ops.embedding(ids, table), reference.embedding(ids, table))
    many = torch.randint(0, 40, (9000,))  # for several threads
    assert torch.equal(ops.embedding(many, table), table[many])


def paged_case(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random q, cache, block tables, query starts, contexts of sequences of (query tokens, context)."""
    blocks_of = [-(-context // block_size) for _, context in lengths]
    shuffled = torch.randperm(sum(blocks_of)) + 1
    tables = torch.zeros(len(lengths), max(blocks_of), dtype=torch.int32)
    for row, blocks in zip(tables, torch.split(shuffled, blocks_of), strict=True):
        row[: len(blocks)] = blocks
    kv = torch.randn(1 + len(shuffled), 2, kv_heads, block_size, dim).to(dtype)
    kv[0] = float("nan")
    for row, (_, context) in zip(tables, lengths, strict=True):
        if context % block_size:
            kv[row[(context - 1) // block_size], :, :, context % block_size :] = float("nan")
    starts = torch.tensor([0, *(tokens for tokens, _ in lengths)]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, dim).to(dtype)
    return q, kv, tables, starts, torch.tensor([context for _, context in lengths], dtype=torch.int32)


def check_attention(q: Tensor, kv: Tensor, *arguments: Any) -> None:
    """Asserts that the kernels give what the reference gives."""
    expected = reference.paged_attention(q.float(), kv.float(), *arguments)
    assert not expected.isnan().any()
    assert_close(ops.paged_attention(q, in_slabs(kv), *arguments).float(), expected, 1e-2 if q.dtype == BF16 else 1e-5)


DECODE = [(1, 1), (1, 7), (1, 16), (1, 63), (1, 65), (1, 300)]
CHUNKS = [(1, 1), (5, 5), (70, 70), (3, 200), (150, 400)]
MIXED = [(1, 130), (40, 40), (1, 1), (1, 33), (9, 300), (0, 20)]
DRAFTS = [(2, 2), (70, 330), (8, 9), (1, 700), (7, 40), (3, 600), (20, 90), (9, 530), (6, 1100), (0, 20), (5, 65), (4, 256)]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (37, 0.0), (0, 5.0), (128, 3.0)])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "block_size"),
    [
        (DECODE, 16, 8, 128, 16),
        (DECODE, 3, 3, 16, 8),
        (DECODE, 5, 1, 80, 32),
        (DECODE, 16, 1, 64, 16),
        (DECODE, 14, 2, 256, 16),
        (DECODE, 8, 1, 512, 16),
        (CHUNKS, 16, 8, 128, 16),
        (CHUNKS, 3, 3, 16, 8),
        (CHUNKS, 5, 1, 80, 32),
        (CHUNKS, 16, 1, 96, 16),
        (CHUNKS, 4, 2, 256, 16),
        (CHUNKS, 8, 1, 512, 16),
        (MIXED, 6, 2, 64, 16),
    ],
)
def test_paged_attention(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> None:
    q, kv, tables, starts, contexts = paged_case(lengths, heads, kv_heads, dim, block_size, dtype)
    check_attention(q, kv, tables, starts, contexts, dim**-0.5, window, soft_cap)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cache", [BF16, FP32, FP8])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (37, 0.0), (0, 5.0), (300, 3.0)])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "block_size"),
    [
        (DRAFTS, 4, 2, 128, 16),
        (DRAFTS, 3, 3, 16, 8),
        (DRAFTS, 5, 1, 80, 32),
        (DRAFTS, 16, 1, 64, 16),
        ([(8, 3000)], 8, 1, 64, 16),
        ([(3, 3000), (2, 900)], 8, 4, 256, 32),
    ],
)
def test_paged_attention_of_decodes_with_drafts(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int,
    soft_cap: float,
    cache: torch.dtype,
    threads: int,
) -> None:
    """Decodes of 1 to 9 tokens beside chunks; contexts are in one part or several."""
    torch.set_num_threads(threads)
    dtype = FP32 if cache == FP32 else BF16
    q, kv, tables, starts, contexts = paged_case(lengths, heads, kv_heads, dim, block_size, dtype)
    kv, scales = kv.to(cache), (0.5, 3.0) if cache == FP8 else (1.0, 1.0)
    check_attention(q, kv, tables, starts, contexts, dim**-0.5, window, soft_cap, *scales)


@pytest.mark.parametrize(("window", "context"), [(0, 90), (0, 2500), (64, 2500)])
def test_attention_of_a_token_is_the_same_whatever_drafts_follow(window: int, context: int) -> None:
    heads, kv_heads, dim = 8, 2, 64
    q, kv, tables, _, _ = paged_case([(9, context)], heads, kv_heads, dim, 16, FP32)

    def attend(first: int, tokens: int) -> Tensor:
        """Attends from the tokens [first, first + tokens) of the last 9 of the sequence."""
        starts, contexts = torch.tensor([0, tokens]).int(), torch.tensor([context - 9 + first + tokens]).int()
        return ops.paged_attention(q[first : first + tokens], kv, tables, starts, contexts, 0.125, window)

    alone = torch.cat([attend(i, 1) for i in range(9)])
    for tokens in range(2, 10):
        assert_close(attend(0, tokens), alone[:tokens], 2e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "window"),
    [(DECODE, 16, 8, 128, 0), (DECODE, 5, 1, 80, 37), ([(1, 3000)], 4, 1, 64, 0), (CHUNKS, 14, 2, 256, 0), (MIXED, 3, 3, 16, 37)],
)
def test_paged_attention_over_fp8(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype
) -> None:
    q, kv, tables, starts, contexts = paged_case(lengths, heads, kv_heads, dim, 16, dtype)
    kv[:, :, :, ::3] /= 128  # some that are subnormal
    fp8 = kv.to(FP8)
    arguments, scales = (tables, starts, contexts, dim**-0.5, window, 3.0), (0.5, 3.0)
    expected = 3 * reference.paged_attention(q.float(), fp8.float(), *arguments[:3], arguments[3] / 2, *arguments[4:])
    assert not expected.isnan().any()
    assert_close(ops.paged_attention(q, in_slabs(fp8), *arguments, *scales).float(), expected, 1e-2 if dtype == BF16 else 1e-5)
    assert_close(reference.paged_attention(q, fp8, *arguments, *scales).float(), expected, 1e-2 if dtype == BF16 else 1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("heads", "dim"), [(1, 256), (16, 16)])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_each_code_of_fp8_reads_as_in_torch(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Keys are 0 and a sequence's values alike, so the answer is the value. Chunks of heads of 16 are unpacked 16 at a time."""
    q, kv, tables, starts, contexts = paged_case([(tokens, tokens)], heads, heads, dim, 8, dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).view(heads, dim)
    kv = torch.stack((torch.zeros(heads, 8, dim).to(FP8), codes[:, None].expand(heads, 8, dim))).expand(len(kv), -1, -1, -1, -1)
    found = ops.paged_attention(q, in_slabs(kv), tables, starts, contexts, 1.0)
    torch.testing.assert_close(found, codes.to(dtype).expand_as(found), rtol=2e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache", [BF16, FP32, FP8, INT8, INT4])
@pytest.mark.parametrize(("part", "soft_cap"), [(0, 0.0), (0, 5.0), (1, 0.0)])
def test_rows_that_read_what_is_not_a_number_show_it(part: int, soft_cap: float, cache: torch.dtype) -> None:
    """One token's key (0) or value (1) of one head is broken: in single tokens, split ones and chunks as in the reference."""
    lengths = [(1, 40), (30, 40), (1, 1500), (1, 40), (30, 40)]
    q, kv, tables, starts, contexts = paged_case(lengths, 4, 2, 64, 16, torch.float32)
    at = 20
    for sequence in range(3):
        kv[tables[sequence, at // 16], part, 1, at % 16, 3] = torch.nan
    arguments = (tables, starts, contexts, 0.125, 0, soft_cap)
    for dtype in (cache,) if cache in (BF16, FP32) else (BF16, FP32):
        stored = in_slabs(cached(kv.to(dtype), cache, 1.0))
        found = ops.paged_attention(q.to(dtype), stored, *arguments).isnan()
        expected = reference.paged_attention(q.to(dtype), stored, *arguments).isnan()
        unseeing = slice(1, 1 + at - 10)  # a value that they do not weigh may show as well
        found[unseeing] = expected[unseeing] = False
        assert torch.equal(found, expected)
        assert expected[[0, 31]].any(-1).tolist() == [[False, False, True, True]] * 2 and not expected[32:].any()


@pytest.mark.parametrize("cache", [BF16, FP32, FP8, INT4])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (37, 3.0)])
def test_paged_attention_with_sinks(window: int, soft_cap: float, cache: torch.dtype) -> None:
    """Decodes, drafts and chunks; contexts in one part or several, and a sequence's first token, of which a sink takes most."""
    dtype = FP32 if cache == FP32 else BF16
    q, kv, tables, starts, contexts = paged_case([*DRAFTS, *MIXED, (1, 3000)], 6, 2, 96, 16, dtype)
    kv, scales = in_slabs(cached(kv, cache, 1.0)), (0.5, 3.0) if cache == FP8 else (1.0, 1.0)
    sinks = 3 * torch.randn(6)
    arguments = (tables, starts, contexts, 96**-0.5, window, soft_cap, *scales)
    found, without = ops.paged_attention(q, kv, *arguments, sinks), ops.paged_attention(q, kv, *arguments)
    expected = reference.paged_attention(q.float(), uncached(kv, FP32), *arguments, sinks)
    assert_close(found.float(), expected, 1e-2 if dtype == BF16 else 1e-5)
    assert not torch.equal(found, without)


def test_paged_attention_splits_a_lone_long_context() -> None:
    q, kv, tables, starts, contexts = paged_case([(1, 3000)], 4, 1, 64, 16, BF16)
    arguments = (tables, starts, contexts, 0.125)
    expected = reference.paged_attention(q.float(), kv.float(), *arguments)
    assert_close(ops.paged_attention(q, kv, *arguments).float(), expected, 1e-2)


def test_paged_attention_skips_blocks_before_the_window() -> None:
    q, kv, tables, starts, contexts = paged_case([(1, 200), (40, 230), (4, 210)], 4, 2, 64, 16, BF16)
    arguments = (tables, starts, contexts, 0.125, 50)
    whole = ops.paged_attention(q, kv, *arguments)
    tables[0, : (200 - 50) // 16] = 0  # the block full of not-a-numbers
    tables[1, : (191 - 50) // 16] = 0
    tables[2, : (207 - 50) // 16] = 0
    assert torch.equal(ops.paged_attention(q, kv, *arguments), whole)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("tokens", "k", "wide"), [(1, 1024, False), (3, 100, True), (70, 896, True), (5, 7, False)])
def test_rms_norm(tokens: int, k: int, wide: bool, dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(tokens, k).to(dtype),
        torch.randn(tokens, k).to(dtype),
        torch.randn(k).to(FP32 if wide else dtype),
    )
    actual, expected = torch.empty_like(x), torch.empty_like(x)
    ops.rms_norm(x, weight, 1e-6, actual)
    reference.rms_norm(x, weight, 1e-6, expected)
    assert_close(actual, expected, 4e-3 if dtype == BF16 else 1e-6)
    sums = residual.clone()
    ops.add_rms_norm(x, residual, weight, 1e-6, actual)
    reference.add_rms_norm(x, sums, weight, 1e-6, expected)
    assert torch.equal(residual, sums)
    assert_close(actual, expected, 4e-3 if dtype == BF16 else 1e-6)


def test_rms_norm_in_place() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    expected = torch.empty_like(x)
    ops.rms_norm(x, weight, 1e-6, expected)
    ops.rms_norm(x, weight, 1e-6, x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gates_multiply_strided_rows(dtype: torch.dtype) -> None:
    x, gate = torch.randn(3, 2 * 50 + 1).to(dtype).split([50, 51], dim=1)
    gate = gate[:, 1:]
    assert torch.equal(ops.gate_mul(x, gate), x * gate)
    for opening in ops.OPENINGS:
        for gates in (gate, gate[:, 3:13], gate[:, 20:21]):  # of each column, and of five or all of them
            expected = reference.gate_mul(x, gates, opening)
            assert_close(ops.gate_mul(x, gates, opening), expected, 8e-3 if dtype == BF16 else 1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("norm", [None, "of the rows' type", "wide"])
@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary", "block_size"),
    [
        (1, 16, 8, 128, 128, 16),
        (50, 4, 2, 64, 64, 8),
        (9, 3, 1, 80, 40, 32),
        (7, 2, 2, 16, 16, 16),
        (40, 2, 1, 256, 64, 16),
        (5, 3, 1, 512, 128, 16),
    ],
)
def test_qk_norm_rope_store(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    block_size: int,
    positions_dtype: torch.dtype,
    norm: str | None,
    dtype: torch.dtype,
) -> None:
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    positions = torch.randint(0, 100, (tokens,), dtype=positions_dtype)
    angles = torch.rand(100, rotary // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    q_norm, k_norm = (torch.randn(dim).to(FP32 if norm == "wide" else dtype) if norm else None for _ in "qk")
    slots = torch.randperm(block_size * (tokens // block_size + 2))[:tokens]
    slots[tokens // 2] = -1
    actual_kv = in_slabs(torch.randn(tokens // block_size + 2, 2, kv_heads, block_size, dim).to(dtype))
    expected_kv = actual_kv.clone()
    actual = ops.qk_norm_rope_store(qkv, positions, cos_sin, q_norm, k_norm, 1e-6, actual_kv, slots)
    expected = reference.qk_norm_rope_store(qkv, positions, cos_sin, q_norm, k_norm, 1e-6, expected_kv, slots)
    tolerance = 8e-3 if dtype == BF16 else 1e-6
    assert_close(actual, expected, tolerance)
    assert_close(actual_kv, expected_kv, tolerance)
    assert_untouched(actual_kv)
    alone = ops.qk_norm_rope_store(
        *(qkv[:, : heads * dim], positions, cos_sin, q_norm, k_norm, 1e-6, kv := actual_kv.clone(), slots), stores=False
    )
    assert torch.equal(alone, actual) and torch.equal(kv, actual_kv)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dim", [32, 50, 128])
def test_heads_are_rotated_and_then_normalised(dim: int, dtype: torch.dtype) -> None:
    """Queries and keys have weights of their own; values stay, and what lies beside the rows."""
    whole = torch.randn(3, 7 * dim + 3).to(dtype)
    expected, heads, positions = whole.clone(), (4, 2), torch.tensor([0, 99, 17])
    angles, weights = torch.rand(100, dim // 2) * 6, torch.randn(2, dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    ops.rotate_and_norm(whole[:, 1:-2], heads, positions, cos_sin, weights, 1e-6)
    reference.rotate_and_norm(expected[:, 1:-2], heads, positions, cos_sin, weights, 1e-6)
    assert_close(whole, expected, 8e-3 if dtype == BF16 else 1e-6)
    for beside in (slice(0, 1), slice(1 + 6 * dim, None)):
        assert torch.equal(whole[:, beside], expected[:, beside])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_goes_to_an_fp8_cache_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Every number that fp8 has, what lies between two of them and next to that, what is beyond the largest, and what is none."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float().nan_to_num(0.0).sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    upwards, downwards = (torch.nextafter(between, torch.tensor(to)) for to in (1e9, -1e9))
    special = torch.tensor([449.0, -1e6, 1e-9, torch.inf, torch.nan, -torch.nan])
    values = torch.cat([special, numbers, between, upwards, downwards]).to(dtype)
    values = torch.nn.functional.pad(values, (0, -len(values) % 80)).view(-1, 80)
    tokens, scale = len(values), 0.5
    qkv = torch.cat([torch.randn(tokens, 80), torch.randn(tokens, 80), values * scale], 1).to(dtype)
    angles = torch.rand(tokens, 20) * 6
    arguments = (qkv, torch.arange(tokens), torch.cat((angles.cos(), angles.sin()), -1), None, None, 1e-6)
    kv = in_slabs(torch.full((tokens // 8 + 1, 2, 1, 8, 80), 5.0).to(FP8))
    expected, slots = kv.clone(), torch.randperm(tokens)
    slots[-1] = -1
    ops.qk_norm_rope_store(*arguments, kv, slots, 0.25, scale)
    reference.qk_norm_rope_store(*arguments, expected, slots, 0.25, scale)
    assert_untouched(kv)
    torch.testing.assert_close(kv[:, 1].float(), expected[:, 1].float(), rtol=0, atol=0, equal_nan=True)
    # Keys are rounded from fp32, the reference's from `dtype`: they may fall on the other side.
    torch.testing.assert_close(kv[:, 0].float(), expected[:, 0].float(), rtol=2**-3, atol=2**-9)
    assert (kv[:, 0].float() != expected[:, 0].float()).float().mean() < (0.05 if dtype == BF16 else 1e-3)


@pytest.mark.parametrize("vocab", [1, 7, 1000, 32003])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_sample_draws_the_reference_tokens(vocab: int, spread: float) -> None:
    settings = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.0, 0.3, 1.0, 5.0)
        for top_k in (0, 1, 20, 5000)
        for top_p in (0.0, 0.3, 0.95, 1.0)
        for min_p in (0.0, 0.1)
    ]
    rows = len(settings)
    logits = spread * torch.randn(rows, vocab)
    logits[:, ::3] = logits[:, ::3].round()  # ties
    logits[1, : vocab // 2] = float("-inf")
    seed, position = torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.arange(rows)
    arguments = (logits, sampling_metadata(settings), seed, position)
    assert torch.equal(ops.sample(*arguments), reference.sample(*arguments))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_alone_is_sampled_as_among_others(threads: int) -> None:
    """Several threads share a row of so many logits. The first of equals is taken, and what is no number is found."""
    settings = [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)]
    logits = (4 * torch.randn(9, 70_001)).round()
    logits[3:6, [0, 23_334, 35_001, 70_000]] = 50.0
    logits[6, [69_000, 40_000]], logits[7, 30_000] = torch.nan, torch.inf
    logits[8] = -torch.inf
    seed = torch.arange(3)
    for first in (0, 3, 6):
        for metadata in (sampling_metadata([params] * 3) for params in settings):
            rows = logits[first : first + 3]
            expected = reference.sample(rows, metadata, seed, seed)
            torch.set_num_threads(threads)
            alone = [
                ops.sample(rows[r : r + 1], metadata.map(lambda column, r=r: column[r : r + 1]), seed[r : r + 1], seed[r : r + 1])
                for r in range(3)
            ]
            assert torch.equal(torch.cat(alone), expected)


def test_sample_follows_the_distribution() -> None:
    rows, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])
    metadata = sampling_metadata([SamplingParams()] * rows)
    tokens = ops.sample(logits.expand(rows, -1).contiguous(), metadata, torch.full((rows,), 7), torch.arange(rows))
    assert torch.allclose(tokens.bincount(minlength=5) / rows, logits.softmax(-1), atol=0.015)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 200)
    logits[1, [150, 33, 34]] = 1.0
    logits[2] = float("-inf")
    zeros = torch.zeros(3, dtype=torch.int64)
    tokens = ops.sample(logits, sampling_metadata([GREEDY] * 3), zeros, zeros)
    assert tokens.tolist() == [0, 33, 0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1)])
def test_a_broken_row_gives_a_token_that_shows_it(params: SamplingParams) -> None:
    logits = torch.randn(6, 3000)
    logits[0, [2500, 2600]] = torch.nan
    logits[1, [2700, 40]] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, 2999], logits[4, 2998] = torch.nan, torch.inf
    arguments = (logits, sampling_metadata([params] * 6), torch.arange(6), torch.arange(6))
    chosen = ops.sample(*arguments)
    assert torch.equal(chosen, reference.sample(*arguments))
    assert chosen.tolist()[:5] == [2500, 40, 0, 0, 2998]
    assert logits.gather(1, chosen[:, None]).isfinite()[:, 0].tolist() == [False] * 5 + [True]


def test_greedy_sees_what_is_not_a_number_wherever_it_lies() -> None:
    """A row for each place in a register, of four that are worked off together, and in the last, which is not full."""
    at = torch.tensor([*range(16), 17, 40, 63, 64, 2990, 2999])
    logits = torch.randn(len(at) + 2, 3000)
    logits[torch.arange(len(at)), at] = torch.where(at % 2 == 0, torch.nan, -torch.nan)
    logits[-2, [7, 1000, 2000]] = torch.tensor([-torch.inf, 2.0, torch.inf])
    logits[-1, :2000], logits[-1, 2000:], logits[-1, 1234] = 3.2e38, -torch.inf, 3.3e38  # their sum is too large for a float
    zeros = torch.zeros(len(logits), dtype=torch.int64)
    chosen = ops.sample(logits, sampling_metadata([GREEDY] * len(logits)), zeros, zeros)
    assert chosen.tolist() == [*at.tolist(), 2000, 1234]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [*VOCABS, 20_011])
def test_a_mask_forbids_what_it_does_not_allow(vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    check_masks(ops.apply_token_bitmask, vocab, torch.device("cpu"))


def test_masks_of_no_rows_change_nothing() -> None:
    logits, nothing = torch.zeros(2, 40), torch.zeros(0, 2, dtype=torch.int32)
    ops.apply_token_bitmask(logits, nothing[:, 0].long(), nothing)
    assert not logits.any()


@pytest.mark.parametrize("allowed", [[], [0], [2999], [7, 8, 2500]])
def test_forbidden_tokens_are_never_drawn(allowed: list[int]) -> None:
    settings = [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1)]
    logits = torch.full((3, 3000), -torch.inf)
    logits[:, allowed] = torch.randn(3, len(allowed))
    arguments = (logits, sampling_metadata(settings), torch.arange(3), torch.arange(3))
    chosen = ops.sample(*arguments)
    assert torch.equal(chosen, reference.sample(*arguments))
    assert set(chosen.tolist()) <= set(allowed or [0])
