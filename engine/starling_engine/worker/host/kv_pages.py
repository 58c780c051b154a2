"""The pages of the KV cache, for a runner: copies of blocks, and the context of a forward pass."""

from collections.abc import Callable, Iterable, Sequence

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.kv_cache import KVCache
from starling_engine.kv.spec import KVGroup, StateGroup
from starling_engine.models.decoder import ForwardContext
from starling_engine.step import StepPlan


class KVPages:
    """Pages of the rank's `layers`; default: all that cache something. `tick` is called as each layer ends."""

    def __init__(
        self,
        kv: KVCache,
        groups: Sequence[KVGroup],
        tick: Callable[[], None],
        state: StateGroup | None = None,
        layers: Iterable[int] | None = None,
    ) -> None:
        self.device = kv.storage.device
        self.groups = list(groups)
        self._kv = kv
        self.tick = tick
        self._group_of = dict.fromkeys(state.layers if state is not None else (), len(groups))
        self._group_of |= {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._has_state = state is not None
        whole = kv.storage.shape[1]
        self._block_bytes = [*(group.block_bytes for group in groups), whole]
        """Bytes that a group has in a slab; a state has all."""
        self._layers = tuple(sorted(self._group_of) if layers is None else layers)

    @property
    def num_layers(self) -> int:
        """The rank's layers, those with recurrent state included."""
        return len(self._group_of)

    def copy(self, plan: StepPlan) -> None:
        """Copies the plan's blocks, in all layers of their groups."""
        for copy in plan.copies:
            slabs = self._kv.storage[:, : self._block_bytes[copy.group]]
            slabs[copy.target] = slabs[copy.source]

    def context(self, metadata: Sequence[AttentionMetadata], rows: torch.Tensor | None) -> ForwardContext:
        """Returns the context of a forward pass. `metadata` of each group; `rows` as in ForwardContext."""
        own = [metadata[self._group_of.get(layer, 0)] for layer in self._layers]
        return ForwardContext(self._kv.layers, own, rows, self.tick, state=metadata[-1] if self._has_state else None)
