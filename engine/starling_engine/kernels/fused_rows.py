"""Chooses what the kernel for products of few rows multiplies: with the norm before them and what follows, or alone.

Imports no triton.
"""

from dataclasses import dataclass

import torch

from starling_engine.platforms.triton_support import capability, why_not_triton

MOST_ROWS = 16
"""Rows of one instruction of the tensor cores: more would take the matrix twice, or other tiles."""

FUSED_ROWS = {8: 8, 9: MOST_ROWS}
"""Most rows by the first digit of the compute capability; above them, and elsewhere, cuBLAS multiplies.

Up to so many the launches that are saved outweigh what cuBLAS gains, as `bench.gpu.tape` predicts it for Hopper: nothing was timed.
Of cards with less of an L2 cache, from which each program reads the rows, half of that is assumed.
"""

ALONE_ROWS = 1
"""Most rows of a product alone in bf16 on Hopper, as the head is. Ours was not timed.

For one row cuBLAS has a kernel of its own: an H200 read 822 MB by it at 3.92 TB/s. By another's kernel with copies ahead, as ours
has, it read them at 4.26 (tile-ai/TileOPs, pull request 244). For 16 rows an H100 read 462 MB by cuBLAS as fast as it copies
(vllm-project/vllm, pull request 49363).
"""


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The RMSNorm of the rows that are multiplied: weight [K] of their dtype or fp32, and what is added to the mean square."""

    weight: torch.Tensor
    eps: float


def fused_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Returns the most rows for `few_rows_linear`; 0 where its kernel does not run, or cuBLAS is taken for faster."""
    if dtype not in (torch.bfloat16, torch.float32) or why_not_triton(device) is not None:
        return 0
    return FUSED_ROWS.get(capability(device) // 10, 0)


def alone_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Returns the most rows that `few_rows_linear` multiplies without a norm or a residual; 0 but in bf16 from Hopper on."""
    return min(ALONE_ROWS, fused_rows(dtype, device)) if dtype == torch.bfloat16 and capability(device) >= 90 else 0
