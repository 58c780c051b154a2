"""The pages of the KV cache, for a runner: copies of blocks, and the context of a forward pass."""

from collections.abc import Callable, Sequence

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kv.spec import KVGroup
from starling_engine.models.decoder import ForwardContext
from starling_engine.step import StepPlan


class KVPages:
    """Pages of the rank's layers. `kv` has each layer's view of the pool, in their order; `tick` is called as each layer ends."""

    def __init__(self, kv: list[torch.Tensor], groups: Sequence[KVGroup], tick: Callable[[], None]) -> None:
        self.device = kv[0].device
        self.groups = list(groups)
        self._kv = kv
        self.tick = tick
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._index_of = {layer: index for index, layer in enumerate(sorted(self._group_of))}

    def copy(self, plan: StepPlan) -> None:
        """Copies the plan's blocks, in all layers of their groups."""
        for copy in plan.copies:
            for layer in self.groups[copy.group].layers:
                pages = self._kv[self._index_of[layer]]
                pages[copy.target] = pages[copy.source]

    def context(self, metadata: Sequence[AttentionMetadata], rows: torch.Tensor | None) -> ForwardContext:
        """Returns the context of a forward pass. `metadata` of each group; `rows` as in ForwardContext."""
        return ForwardContext(self._kv, [metadata[self._group_of[layer]] for layer in self._index_of], rows, self.tick)
