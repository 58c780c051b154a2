"""A cache of int8 or int4: what is stored, judged by llama.cpp's own package, and what attention reads."""

import gguf
import numpy as np
import pytest
import torch
from starling_engine.native import load, ops, reference
from starling_engine.native.cache_rows import INT4, INT8, cached, columns, uncached
from torch import Tensor

from tests.engine.slabs import assert_untouched, in_slabs
from tests.engine.test_native import CHUNKS, DECODE, DRAFTS, MIXED, assert_close, paged_case
from tests.engine.test_native import _kernels as _kernels
from tests.engine.test_native import _two_threads_same_numbers as _two_threads_same_numbers

pytestmark = pytest.mark.skipif(load() is None, reason="this machine has no native kernels")

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {INT8: gguf.GGMLQuantizationType.Q8_0, INT4: gguf.GGMLQuantizationType.Q4_1}
"""The types of llama.cpp that have the same bits."""


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
def test_numbers_are_as_near_as_llama_cpp_s(cache: torch.dtype, spread: float) -> None:
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(0)) * spread
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), KINDS[cache]), KINDS[cache])
    error = (uncached(cached(x, cache, 1.0), FP32) - x).abs().numpy()
    assert error.mean() <= 1.001 * np.abs(theirs - x.numpy()).mean()
    assert error.max() <= 1.02 * np.abs(theirs - x.numpy()).max()


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize(("dim", "rotary"), [(32, 32), (64, 16), (128, 128), (512, 64)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_is_stored_is_the_reference_s_to_the_bit(dim: int, rotary: int, dtype: torch.dtype, cache: torch.dtype) -> None:
    tokens, heads, kv_heads, block_size = 70, 6, 2, 8
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim)
    special = (0.0, 1e-9, 1e-6, -3.0, 6e4, 1e9, torch.inf, -torch.inf, torch.nan)
    for token, number in enumerate(special):
        qkv[token, heads:, 3] = number
        qkv[len(special) + token, heads:] = number
    qkv = qkv.flatten(1).to(dtype)
    angles, q_norm, k_norm = torch.randn(100, rotary), torch.rand(dim).to(dtype), None
    slots = torch.randperm(80)[:tokens]
    slots[tokens // 2] = -1
    rows = cached(torch.zeros(10, 2, kv_heads, block_size, dim), cache, 1.0)
    found, expected = in_slabs(rows), rows.clone()
    arguments = (qkv, torch.arange(tokens), angles, q_norm, k_norm, 1e-6)
    ops.qk_norm_rope_store(*arguments, found, slots)
    reference.qk_norm_rope_store(*arguments, expected, slots)
    assert_untouched(found)
    # A row of NaN may have any code: its scale says so.
    assert columns(found) == dim
    torch.testing.assert_close(uncached(found, FP32), uncached(expected, FP32), rtol=0, atol=0, equal_nan=True)
    broken = torch.isnan(uncached(found, FP32)).any(-1).flatten(0, 3).sum().item()
    assert broken == 2 * 3 * 2 * kv_heads, "keys and values of each token with what is not a number, and no others"


AttentionCase = tuple[list[tuple[int, int]], int, int, int, int, int, float]
"""Lengths as `paged_case` has them, heads, KV heads, head dimension, block size, window, soft cap."""
ATTENTION: list[AttentionCase] = [
    (DECODE, 16, 8, 128, 16, 0, 0.0),
    (DECODE, 4, 1, 64, 8, 37, 3.0),
    ([(1, 3000)], 4, 1, 64, 16, 0, 0.0),
    (DRAFTS, 6, 2, 96, 32, 37, 0.0),
    (CHUNKS, 14, 2, 256, 16, 0, 5.0),
    (MIXED, 3, 3, 32, 16, 37, 0.0),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("case", ATTENTION)
def test_paged_attention(case: AttentionCase, cache: torch.dtype, dtype: torch.dtype, threads: int) -> None:
    """The reference reads what the rows say, as numbers."""
    lengths, heads, kv_heads, dim, block_size, window, soft_cap = case
    torch.set_num_threads(threads)
    q, kv, tables, starts, contexts = paged_case(lengths, heads, kv_heads, dim, block_size, dtype)
    rows = cached(kv, cache, 1.0)
    arguments: tuple[Tensor, ...] = (tables, starts, contexts)
    expected = reference.paged_attention(q.float(), uncached(rows, FP32), *arguments, dim**-0.5, window, soft_cap)
    assert not expected.isnan().any()
    found = ops.paged_attention(q, in_slabs(rows), *arguments, dim**-0.5, window, soft_cap)
    assert_close(found.float(), expected, 1e-2 if dtype == BF16 else 1e-5)
    assert_close(reference.paged_attention(q, rows, *arguments, dim**-0.5, window, soft_cap).float(), found.float(), 1e-2)
