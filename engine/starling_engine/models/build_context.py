"""The arguments that every part of a model is built with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from starling_engine.attention.select import Backend
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.layers.elementwise import Arithmetic, arithmetic
from starling_engine.layers.experts import ExpertsSelector
from starling_engine.layers.linear import Linear, LinearShape, MethodSelector
from starling_engine.layers.norm import NORMS, Norm
from starling_engine.layers.rope import Rotations
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.moe import MoeConfig
from starling_engine.models.distance_bias import DistanceBias
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.topology.shard import Share

if TYPE_CHECKING:
    from starling_engine.models.disentangled import DistanceTable

CODE_BLOCK = 32
"""Columns of codes that kernels multiply together."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Shared by all layers. `rotations` are tables as in `AttentionWeights`; `tensor` are the ranks that split every matrix.

    With `expert_ranks` experts are not split: each of those ranks has some experts whole.
    """

    config: ModelConfig
    names: TensorNames
    dtype: torch.dtype
    device: torch.device
    methods: MethodSelector
    experts: ExpertsSelector
    backend: Backend
    rotations: Rotations
    tensor: Communicator = ALONE
    expert_ranks: ExpertRanks | None = None
    distance_bias: DistanceBias | None = None
    distances: "DistanceTable | None" = None

    @property
    def arithmetic(self) -> Arithmetic:
        """Sums and multiples of hidden states."""
        return arithmetic(self.dtype, self.device)

    def expert_width(self, moe: MoeConfig) -> Share:
        """Returns this rank's share of the width of each of its experts.

        It is an even one, but where this would cut blocks of codes, which kernels could then not multiply (gpt-oss on 4 ranks).
        """
        whole, shard, group = moe.intermediate_size, self.tensor.shard, self._code_group
        if self.expert_ranks is not None:
            return Share.all(whole)
        cuts = whole // shard.count % group and not whole % group and whole // group >= shard.count
        return shard.balanced(whole // group).times(group) if cuts else shard.of(whole)

    @property
    def _code_group(self) -> int:
        """Columns that no rank's share may cut: a block where the checkpoint's groups of codes consist of blocks, else 1."""
        scheme = self.config.quantization and self.config.quantization.default
        return CODE_BLOCK if scheme and scheme.group and scheme.group % CODE_BLOCK == 0 else 1

    def linear(self, shape: LinearShape) -> Linear:
        """Makes a linear layer. Where it holds only some columns, the ranks add their products up."""
        split = shape.ins.size < shape.ins.whole
        adapters = None if shape.lookup or shape.only_lookup else self.config.adapters
        return Linear(shape, self.methods(shape), self.dtype, self.device, self.tensor if split else None, adapters)

    def norm(self, name: str, size: int | None = None, eps: float | None = None) -> Norm:
        """Makes a norm of `size` elements that adds `eps` to the mean square. Both default to the model's."""
        config = self.config
        make = NORMS[config.traits.norm]
        return make(name, size or config.hidden_size, config.rms_eps if eps is None else eps, self.dtype, self.device)
