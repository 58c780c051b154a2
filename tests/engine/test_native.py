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


DECODE = [(1, 1), (1, 7), (1, 16), (1, 63), (1, 65), (1, 300)]
CHUNKS = [(1, 1), (5, 5), (70, 70), (3, 200), (150, 400)]
MIXED = [(1, 130), (40, 40), (1, 1), (1, 33), (9, 300), (0, 20)]


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
        (CHUNKS, 16, 8, 128, 16),
        (CHUNKS, 3, 3, 16, 8),
        (CHUNKS, 5, 1, 80, 32),
        (CHUNKS, 16, 1, 96, 16),
        (CHUNKS, 4, 2, 256, 16),
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
    arguments = (tables, starts, contexts, dim**-0.5, window, soft_cap)
    expected = reference.paged_attention(q.float(), kv.float(), *arguments)
    assert not expected.isnan().any()
    assert_close(ops.paged_attention(q, kv, *arguments).float(), expected, 1e-2 if dtype == BF16 else 1e-5)


def test_paged_attention_splits_a_lone_long_context() -> None:
    q, kv, tables, starts, contexts = paged_case([(1, 3000)], 4, 1, 64, 16, BF16)
    arguments = (tables, starts, contexts, 0.125)
    expected = reference.paged_attention(q.float(), kv.float(), *arguments)
    assert_close(ops.paged_attention(q, kv, *arguments).float(), expected, 1e-2)


def test_paged_attention_skips_blocks_before_the_window() -> None:
    q, kv, tables, starts, contexts = paged_case([(1, 200), (40, 230)], 4, 2, 64, 16, BF16)
    arguments = (tables, starts, contexts, 0.125, 50)
    whole = ops.paged_attention(q, kv, *arguments)
    tables[0, : (200 - 50) // 16] = 0  # the block full of not-a-numbers
    tables[1, : (191 - 50) // 16] = 0
    assert torch.equal(ops.paged_attention(q, kv, *arguments), whole)
