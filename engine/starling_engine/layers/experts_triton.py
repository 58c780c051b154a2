"""Experts on a GPU: plain tensors, and all slots of a layer in a few launches of Triton's kernels."""

import torch

from starling_engine.kernels import grouped
from starling_engine.layers.experts_dense import StackedExperts


class TritonExperts(StackedExperts):
    """Needs `triton_runs`. The device sorts tokens by expert without the host, so nothing waits, and graphs can hold a step."""

    name = "triton"
    capturable = True

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not len(x) or not self.loaded:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        tiles = grouped.tiles_for(len(x), expert_slots.shape[1], self.shape.num_experts, x.dtype)
        return grouped.experts(x, expert_slots, weights, self.gate_ups, self.downs, tiles)
