"""RMSNorm of queries and keys, and of values, where attention's kernels have no such norm."""

import torch
from torch.nn import functional as F

from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.native import ops, reference
from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, part_slot


class WidthNorm:
    """Normalises queries over all heads at once, and keys (OLMo 2), in fp32, rounded once. The ranks have some heads each.

    `names` are the modules of both norms, `shares` the elements that this rank has of them.
    """

    def __init__(
        self,
        names: tuple[str, str],
        shares: tuple[Share, Share],
        eps: float,
        ranks: Communicator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._names = names
        self._shares = shares
        self._sizes = [share.size for share in shares]
        self._weights = torch.empty(sum(self._sizes), device=device)
        self._eps = eps
        self._ranks = ranks
        is_native = ranks.shard.count == 1 and elementwise_kernels(dtype, device) == "native"
        self.forward = self._native if is_native else self._torch
        """Normalises the first columns of qkv [T, queries, keys, values], in place."""

    def _native(self, qkv: torch.Tensor) -> None:
        parts = torch.split(qkv[:, : len(self._weights)], self._sizes, dim=1)
        for part, weight in zip(parts, torch.split(self._weights, self._sizes), strict=True):
            ops.rms_norm(part, weight, self._eps, part)

    def _torch(self, qkv: torch.Tensor) -> None:
        both = qkv[:, : len(self._weights)]
        wide = both.float()
        parts = torch.split(wide, self._sizes, dim=1)
        squares = torch.stack([part.square().sum(1) for part in parts], dim=1)
        if self._ranks.shard.count > 1:
            squares = self._ranks.all_reduce(squares)
        for part, sum_, size in zip(parts, squares.unbind(1), self._sizes, strict=True):
            # Keys that several ranks have were counted by each of them.
            part.mul_(torch.rsqrt(sum_ / (size * self._ranks.shard.count) + self._eps)[:, None])
        both.copy_(wide.mul_(self._weights))

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = zip(self._names, self._shares, torch.split(self._weights, self._sizes), strict=True)
        return {f"{name}.weight": part_slot((share,), weight.copy_, element_bytes=4) for name, share, weight in parts}


class RotatedHeadNorm:
    """Rotates queries and keys, and then normalises each head (Hunyuan), in fp32, rounded once.

    Attention's kernels normalise before they rotate. They get a table that rotates nothing.

    `names` are the modules of both norms, `heads` the numbers of heads of queries and of keys, `cos_sin` as in `AttentionWeights`:
    whole heads are rotated.
    """

    def __init__(
        self,
        names: tuple[str, str],
        heads: tuple[int, int],
        head_dim: int,
        cos_sin: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        self._names = names
        self._heads = heads
        self._head_dim = head_dim
        self._cos_sin = cos_sin
        self._weights = torch.empty(2, head_dim, device=cos_sin.device)
        self._eps = eps
        is_native = elementwise_kernels(dtype, cos_sin.device) == "native"
        self._kernel = ops.rotate_and_norm if is_native else reference.rotate_and_norm

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotates and normalises the first columns of qkv [T, queries, keys, values], in place. positions [T] int64."""
        self._kernel(qkv, self._heads, positions, self._cos_sin, self._weights, self._eps)

    def weight_slots(self) -> dict[str, WeightSlot]:
        whole = (Share.all(self._head_dim),)
        parts = zip(self._names, self._weights, strict=True)
        return {f"{name}.weight": part_slot(whole, weight.copy_, element_bytes=4) for name, weight in parts}


class ValueNorm:
    """Normalises each head's values (Gemma 4), without a weight, in fp32, rounded once. `width` elements are of all heads.

    Vectors inside a Mamba mixer are such a head (Falcon Mamba).
    """

    def __init__(self, width: int, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self._width = width
        self._size = (head_dim,)
        self._eps = eps
        self._ones = torch.ones(head_dim, device=device)
        self.forward = self._native if elementwise_kernels(dtype, device) == "native" else self._torch
        """Normalises the last columns of qkv [T, queries, keys, values], in place."""

    def _native(self, qkv: torch.Tensor) -> None:
        for head in torch.split(qkv[:, -self._width :], self._size[0], dim=1):
            ops.rms_norm(head, self._ones, self._eps, head)

    def _torch(self, qkv: torch.Tensor) -> None:
        values = qkv[:, -self._width :]
        heads = values.view(len(values), -1, *self._size)
        heads.copy_(F.rms_norm(heads.float(), self._size, None, self._eps))
