"""The optional backends without their packages: stand-ins keep to what the packages document, and attend by torch."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from starling_engine.attention.base import AttentionBackend
from starling_engine.native import reference

from tests.engine.attention.test_paged import test_equals_attention_written_out as _written_out

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these put their tensors on the CPU, and the kernels are compiled here"
)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """Does what flash-attn documents: sequences packed on both sides, causality from the bottom right, both ends of a window."""
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    out = torch.empty_like(q)
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for s in range(len(starts) - 1):
        rows, keys = slice(*starts[s : s + 2]), slice(*key_starts[s : s + 2])
        if rows.start < rows.stop:
            both = (x[keys].transpose(0, 1) for x in (k, v))
            out[rows] = reference._attend(q[rows], *both, softmax_scale, window_size[0] + 1, softcap, None)
    return out


class BatchPrefillWithPagedKVCacheWrapper:
    """Does what flashinfer documents: compressed rows of pages, 1 to page_size tokens in a last page, `window_left` keys."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal and q_data_type == kv_data_type
        counts = paged_kv_indptr.diff()
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for table, pages in zip(tables, paged_kv_indices.split(counts.tolist()), strict=True):
            table[: len(pages)] = pages
        lengths = torch.where(counts > 0, (counts - 1) * page_size + paged_kv_last_page_len, 0)
        self._shape, self._cache = (num_qo_heads, head_dim_qk), (num_kv_heads, page_size, head_dim_qk)
        self._rest = tables, qo_indptr, lengths, sm_scale, window_left + 1, logits_soft_cap or 0.0

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        assert q.shape[1:] == self._shape and paged_kv_cache.shape[2:] == self._cache
        # The reference multiplies what it hides by 0, and this cache is full of NaN.
        return reference.paged_attention(q, paged_kv_cache.nan_to_num(), *self._rest)


@pytest.fixture(params=["flash_attn", "flashinfer"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionBackend]:
    package: Any = ModuleType(request.param)
    package.flash_attn_varlen_func = flash_attn_varlen_func
    package.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, request.param, package)
    if request.param == "flash_attn":
        from starling_engine.attention.flash import FlashAttention

        yield FlashAttention()
    else:
        from starling_engine.attention.flashinfer import FlashInferAttention

        yield FlashInferAttention()
    for module in ("flash", "flashinfer"):
        sys.modules.pop(f"starling_engine.attention.{module}", None)


@pytest.mark.parametrize("name", ["window of one block", "soft cap in a window"])
def test_equals_attention_written_out(name: str, backend: AttentionBackend) -> None:
    _written_out(name, torch.float32, 1e-5, backend)
