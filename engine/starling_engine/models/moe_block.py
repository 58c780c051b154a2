"""The MLP of a layer with experts."""

import torch

from starling_engine.layers.experts import ExpertNames, Experts, ExpertsShape
from starling_engine.layers.linear import stacked
from starling_engine.layers.router import Router
from starling_engine.models.build import BuildContext
from starling_engine.models.mlp import Mlp
from starling_engine.models.moe import MoeConfig
from starling_engine.weights.slot import Slot


class MoeBlock:
    """Each token's sum over the experts that the router sends it to, and over those that all tokens share, if there are any."""

    def __init__(self, build: BuildContext, moe: MoeConfig, prefix: str) -> None:
        self._router = _router(build, moe, prefix)
        self._experts = _experts(build, moe, prefix)
        self._shared = _shared(build, moe, prefix) if moe.shared_size else None
        self._add_up = build.tensor.all_reduce if build.tensor.shard.count > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size].

        Not in pieces, as the plain MLP is: every piece would read the weights of nearly all experts.
        """
        weights, ids = self._router.forward(x)
        out = self._experts.forward(x, ids, weights)
        if self._add_up is not None:
            out = self._add_up(out.float()).to(x.dtype)
        return out if self._shared is None else out.add_(self._shared.forward(x))

    def slots(self) -> dict[str, Slot]:
        shared = {} if self._shared is None else self._shared.slots()
        return {**self._router.slots(), **self._experts.slots(), **shared}


def _router(build: BuildContext, moe: MoeConfig, prefix: str) -> Router:
    names = build.names
    gate = build.linear(stacked([f"{prefix}.{names.router}"], [moe.num_experts], build.config.hidden_size, exact=True))
    return Router(gate, moe.routing, f"{prefix}.{names.router_bias}", f"{prefix}.{names.fused_router}", build.device)


def _experts(build: BuildContext, moe: MoeConfig, prefix: str) -> Experts:
    names = build.names
    shape = ExpertsShape(build.experts_held(moe), build.config.hidden_size, build.expert_width(moe))
    tensors = ExpertNames(f"{prefix}.{names.experts}", names.expert_shards, f"{prefix}.{names.fused_experts}")
    return Experts(tensors, shape, build.experts(shape), build.dtype, build.device)


def _shared(build: BuildContext, moe: MoeConfig, prefix: str) -> Mlp:
    gate, up, down = (f"{prefix}.{build.names.shared_experts}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    return Mlp(build, (gate, up, down), moe.shared_size)
