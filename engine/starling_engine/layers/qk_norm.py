"""RMSNorm of queries and keys where attention's kernels have no such norm. In torch."""

import torch

from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, part_slot


class WidthNorm:
    """Normalises queries over all heads at once, and keys (OLMo 2), in fp32, rounded once. The ranks have some heads each.

    `names` are the modules of both norms, `shares` the elements that this rank has of them.
    """

    def __init__(
        self, names: tuple[str, str], shares: tuple[Share, Share], eps: float, ranks: Communicator, device: torch.device
    ) -> None:
        self._names = names
        self._shares = shares
        self._sizes = [share.size for share in shares]
        self._weights = torch.empty(sum(self._sizes), device=device)
        self._eps = eps
        self._ranks = ranks

    def forward(self, qkv: torch.Tensor) -> None:
        """Normalises the first columns of qkv [T, queries, keys, values], in place."""
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
