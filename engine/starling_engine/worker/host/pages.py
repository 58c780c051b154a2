"""The pages of the KV cache as a runner uses them."""

from collections.abc import Callable, Sequence

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kv.spec import KVGroup
from starling_engine.models.context import ForwardContext
from starling_engine.step import StepPlan


class KVPages:
    """`kv` has each layer's view of the pool, in the order of the layers that are here; `tick` is called as each ends."""

    def __init__(self, kv: list[torch.Tensor], groups: Sequence[KVGroup], tick: Callable[[], None]) -> None:
        self.device = kv[0].device
        self.groups = list(groups)
        self._kv = kv
        self._tick = tick
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._place = {layer: at for at, layer in enumerate(sorted(self._group_of))}

    def copy(self, plan: StepPlan) -> None:
        """The plan's block copies, in all layers of their groups."""
        for copy in plan.copies:
            for layer in self.groups[copy.group].layers:
                pages = self._kv[self._place[layer]]
                pages[copy.target] = pages[copy.source]

    def context(self, metadata: Sequence[AttentionMetadata], rows: torch.Tensor | None) -> ForwardContext:
        """`metadata` of each group; `rows` as in ForwardContext."""
        return ForwardContext(self._kv, [metadata[self._group_of[layer]] for layer in self._place], rows, self._tick)
