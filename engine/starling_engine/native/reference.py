"""What each kernel of `ops` computes, in plain torch with the same signatures. It runs on any device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from starling_engine.native.packed import PackedWeight


def pack_linear(weight: Tensor) -> PackedWeight:
    """Keeps the weight [N, K] as it is."""
    return PackedWeight(weight, *weight.shape)


def linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x [M, K] times the weight, plus bias [N], summed in fp32 -> [M, N] of `out_dtype`."""
    weight = packed.data
    if out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(out_dtype), weight.to(out_dtype), None if bias is None else bias.to(out_dtype))


def embedding_packed(ids: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Rows ids [T] int64 of the weight -> out [T, K]."""
    torch.index_select(packed.data, 0, ids, out=out)
