"""Merges attention over parts of the keys: split contexts (Flash-Decoding) and the two passes of cascade attention.

Each part has the result of its own softmax, and the logarithm of that softmax's denominator (LSE), which is its weight
(arXiv 2501.01005, section 2.2).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Partial:
    """Partial results: out [T, H, segments, D], and lse [T, H, segments] to the base 2, both fp32. Without keys an lse is -inf."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(q: Tensor, segments: int) -> "Partial":
        """Allocates the results of q [T, H, D]."""
        tokens, heads, dim = q.shape
        lse = torch.empty(tokens, heads, segments, dtype=torch.float32, device=q.device)
        return Partial(lse.new_empty(tokens, heads, segments, dim), lse)

    @property
    def segments(self) -> int:
        return self.lse.shape[2]


@triton.jit
def _merge(
    partial_out, partial_lse, out, SEGMENTS: tl.constexpr, PADDED_SEGMENTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Program (row of T * H)."""
    row = tl.program_id(0).to(tl.int64)
    segments = tl.arange(0, PADDED_SEGMENTS)
    dims = tl.arange(0, PADDED_DIM)
    lse = tl.load(partial_lse + row * SEGMENTS + segments, mask=segments < SEGMENTS, other=float("-inf"))
    # A segment without keys was never written, and is not read.
    some = lse > float("-inf")
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0))
    pointers = partial_out + (row * SEGMENTS + segments)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(pointers, mask=some[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def merge(partial: Partial, dtype: torch.dtype) -> Tensor:
    """Returns the attention [T, H, D] over all segments."""
    tokens, heads, segments, dim = partial.out.shape
    out = partial.out.new_empty(tokens, heads, dim, dtype=dtype)
    _merge[(tokens * heads,)](
        partial.out,
        partial.lse,
        out,
        SEGMENTS=segments,
        PADDED_SEGMENTS=triton.next_power_of_2(segments),
        HEAD_DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )
    return out
