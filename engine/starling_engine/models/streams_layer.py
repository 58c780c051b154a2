"""A decoder layer between several residual streams (DeepSeek-V4)."""

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.kv_cache import LayerCache, RunCache
from starling_engine.models.build_context import BuildContext
from starling_engine.models.compressed_attention import WindowAndRuns
from starling_engine.models.moe_block import MoeBlock
from starling_engine.models.streams import StreamMixer
from starling_engine.weights.weight_slot import WeightSlot


class StreamsLayer:
    """Attention with compressed runs, and experts. Each has a norm of its input, and a mixer of the streams around it."""

    def __init__(self, build: BuildContext, index: int) -> None:
        config, names = build.config, build.names
        prefix, layer = names.layer.format(index), config.layers[index]
        assert config.compressed is not None and config.moe is not None, "other layers have one residual stream"
        self.attention = WindowAndRuns(build, prefix, layer, config.compressed)
        self.moe = MoeBlock(build, config.moe, index, prefix)
        self.mixers = (self.attention,)
        self._attention_streams = StreamMixer(build, f"{prefix}.{names.attention_streams}")
        self._moe_streams = StreamMixer(build, f"{prefix}.{names.mlp_streams}")
        self._attention_norm = build.norm(f"{prefix}.{names.attention_norm}")
        self._moe_norm = build.norm(f"{prefix}.{names.mlp_norm}")

    def forward(
        self,
        x: torch.Tensor,
        kv: LayerCache,
        meta: AttentionMetadata,
        ids: torch.Tensor,
        tables: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, streams, hidden_size] -> the same behind the layer, or [R, streams, hidden_size] of the tokens `rows` alone.

        ids [T] are the tokens'. `tables` is as for `WindowAndRuns`.
        """
        assert isinstance(kv, torch.Tensor | RunCache), "the layer attends"
        entered, mixed, weights = self._attention_streams.enter(x)
        attended = self.attention.forward(self._attention_norm.forward(entered, None)[0], kv, meta, tables, rows)
        slots = meta.slot_mapping
        if rows is not None:
            mixed, weights, ids, slots = mixed[rows], weights[rows], ids[rows], slots[rows]
        x = mixed + weights.unsqueeze(-1) * attended.unsqueeze(1)
        entered, mixed, weights = self._moe_streams.enter(x)
        found = self.moe.forward(self._moe_norm.forward(entered, None)[0], slots, ids)
        return mixed + weights.unsqueeze(-1) * found.unsqueeze(1)

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = (self._attention_streams, self._attention_norm, self.attention, self._moe_streams, self._moe_norm, self.moe)
        return {name: slot for part in parts for name, slot in part.weight_slots().items()}
