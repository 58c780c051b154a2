"""The arguments that every part of a model is built with."""

from dataclasses import dataclass

import torch

from starling_engine.attention.select import Backend
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.layers.experts import ExpertsSelector
from starling_engine.layers.linear import Linear, LinearShape, MethodSelector
from starling_engine.layers.norm import RMSNorm
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.moe import MoeConfig
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.topology.shard import Share


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Shared by all layers. `cos_sin` as in `AttentionWeights`; `tensor` are the ranks that split every matrix among them.

    With `expert_ranks` experts are not split: each of those ranks has some experts whole.
    """

    config: ModelConfig
    names: TensorNames
    dtype: torch.dtype
    device: torch.device
    methods: MethodSelector
    experts: ExpertsSelector
    backend: Backend
    cos_sin: torch.Tensor
    tensor: Communicator = ALONE
    expert_ranks: ExpertRanks | None = None

    def expert_width(self, moe: MoeConfig) -> Share:
        """Returns this rank's share of the width of each of its experts."""
        whole = moe.intermediate_size
        return Share.all(whole) if self.expert_ranks is not None else self.tensor.shard.of(whole)

    def linear(self, shape: LinearShape) -> Linear:
        """Makes a linear layer. Where it holds only some columns, the ranks add their products up."""
        split = shape.ins.size < shape.ins.whole
        return Linear(shape, self.methods(shape), self.dtype, self.device, self.tensor.all_reduce if split else None)

    def norm(self, name: str, size: int | None = None, eps: float | None = None) -> RMSNorm:
        """Makes a norm of `size` elements that adds `eps` to the mean square. Both default to the model's."""
        config = self.config
        return RMSNorm(name, size or config.hidden_size, config.rms_eps if eps is None else eps, self.dtype, self.device)
