"""A learnt bias of attention scores by the distance of query and key (T5, arXiv 1910.10683, section 2.1), as MPNet has it."""

import math

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.model_config.config import ModelConfig
from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, part_copy_slot

MAX_DISTANCE = 128
"""All distances from here on share a bucket."""


class DistanceBias:
    """The biases of this rank's heads, which all layers share."""

    def __init__(self, config: ModelConfig, name: str, tensor: Communicator, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._buckets = Share.all(config.traits.distance_buckets)
        self._heads = tensor.shard.of(config.num_heads)
        self._table = torch.empty(self._buckets.size, self._heads.size, dtype=dtype, device=device)
        self._longest = config.max_position
        self._whole: torch.Tensor | None = None

    def of_scores(self, q: torch.Tensor, k: torch.Tensor, _meta: AttentionMetadata) -> torch.Tensor:
        """Returns what is added to scores of a sequence's queries [M, H, D] and its first keys [N, H, D], [H, M, N]."""
        return self.matrix(len(q))[..., : len(k)]

    def matrix(self, length: int) -> torch.Tensor:
        """Returns [heads, length, length], added to the scores of a sequence. It is a corner of that of the longest one."""
        if self._whole is None or self._whole.shape[1] < length:
            self._whole = self._made(min(self._longest, max(length, 2 * MAX_DISTANCE)))
        return self._whole[:, :length, :length]

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {f"{self._name}.weight": part_copy_slot([self._buckets, self._heads], self._table)}

    def _made(self, length: int) -> torch.Tensor:
        at = torch.arange(length, device=self._table.device)
        buckets = self._bucket(at[None, :] - at[:, None])
        return self._table[buckets].permute(2, 0, 1).contiguous()

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        """Returns each distance's row: half of the rows are for keys behind the query; half of these are for a distance each."""
        rows = self._buckets.size // 2
        exact = rows // 2
        distant = distance.abs()
        ratio = torch.log(distant.float() / exact) / math.log(MAX_DISTANCE / exact)
        logarithmic = (exact + (ratio * (rows - exact)).to(torch.long)).clamp(max=rows - 1)
        return (distance > 0) * rows + torch.where(distant < exact, distant, logarithmic)
