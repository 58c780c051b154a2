"""A plain MLP and experts side by side (Gemma 4)."""

import torch

from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.model_config.moe import MoeConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.models.mlp import Mlp
from starling_engine.models.moe_block import MoeBlock
from starling_engine.weights.weight_slot import WeightSlot


class ExpertsBesideMlp:
    """Adds up an MLP and experts, the output of each normed by itself.

    The MLP takes the norm that the layer has before both. Experts and their router have their own norms of the same stream.
    """

    def __init__(self, build: BuildContext, moe: MoeConfig, index: int, prefix: str) -> None:
        names = build.names
        self._arithmetic = build.arithmetic
        self.moe = MoeBlock(build, moe, index, prefix)
        self._mlp = Mlp.plain(build, prefix, build.config.layers[index])
        self._mlp_out = build.norm(f"{prefix}.{names.beside_out_norm}")
        self._experts_in = build.norm(f"{prefix}.{names.experts_norm}")
        self._experts_out = build.norm(f"{prefix}.{names.experts_out_norm}")

    @property
    def rounding(self) -> RowRounding | None:
        """The way to round rows before `forward`; None: there is none."""
        return self._mlp.rounding

    def forward(self, x: torch.Tensor | RoundedRows, stream: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        """x, the norm of `stream`, both [T, hidden_size] -> [T, hidden_size]. `slot_mapping` is as in `MoeBlock.forward`.

        The stream is only read: a norm to which nothing is added leaves it as it is.
        """
        out = self._mlp_out.forward(self._mlp.forward(x), None)[0]
        found = self.moe.forward(self._experts_in.forward(stream, None)[0], slot_mapping, router_input=stream)
        return self._arithmetic.add(out, self._experts_out.forward(found, None)[0])

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = (self._mlp, self._mlp_out, self._experts_in, self._experts_out, self.moe)
        return {name: slot for part in parts for name, slot in part.weight_slots().items()}
