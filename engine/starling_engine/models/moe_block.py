"""The MLP of a layer with experts."""

import torch

from starling_engine.layers.experts import ExpertNames, Experts, ExpertsShape
from starling_engine.layers.linear import Linear, stacked
from starling_engine.layers.norm import RMSNorm
from starling_engine.layers.router import Router
from starling_engine.model_config.moe import MoeConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.models.mlp import Mlp
from starling_engine.parallel.rank_part import RankPart, Rows, added, whole
from starling_engine.weights.weight_slot import WeightSlot


class MoeBlock:
    """Sums each token over the experts that the router chooses, and over the experts that all tokens share, if there are any.

    `index` is the decoder layer's.
    """

    def __init__(self, build: BuildContext, moe: MoeConfig, index: int, prefix: str) -> None:
        self.experts = _experts(build, moe, prefix)
        self.moe_layer = moe.layers.index(index)
        """Index of the layer among the model's layers with experts."""
        self._router = _router(build, moe, prefix, index)
        self._shared = SharedExperts(build, moe, prefix) if moe.shared_size else None
        self._arithmetic = build.arithmetic
        self._ranks = build.expert_ranks
        self._tensor = build.tensor
        self._num_experts = moe.num_experts
        self._scaled_inputs = moe.scaled_inputs
        # Not where a step's memory depends on its tokens' experts: that memory is measured with padding.
        self._skips = build.expert_ranks is None and self.experts.method.capturable
        self._no_tokens = torch.empty(0, build.config.hidden_size, dtype=build.dtype, device=build.device)
        self._no_ids = torch.empty(0, dtype=torch.int64, device=build.device)

    def forward(
        self,
        x: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        router_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]. `slot_mapping` as in `AttentionMetadata`: with it padding reads no expert.

        `token_ids` [T] are the tokens', for a layer whose experts go by these. `router_input` [T, hidden_size] is what the router
        reads, where that is not x.

        Not in pieces, as the plain MLP is: every piece would read the weights of nearly all experts.
        """
        return whole(self.forward_part(x, slot_mapping, token_ids, router_input))

    def forward_part(
        self,
        x: torch.Tensor,
        slot_mapping: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        router_input: torch.Tensor | None = None,
    ) -> Rows:
        """Does as `forward`, and leaves the sum to the caller, where ranks have a part of each expert."""
        weights, ids = self._router.forward(
            x if router_input is None else router_input, slot_mapping if self._skips else None, token_ids
        )
        routed = x
        if self._scaled_inputs:
            routed, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if self._ranks is None:
            out = self._part(self.experts.forward(routed, ids, weights))
            return out if self._shared is None else added(out, self._shared.forward_part(x), self._arithmetic.add)
        combine = self._ranks.dispatch(self.moe_layer, routed, ids, weights)
        shared = None if self._shared is None else whole(self._shared.forward_part(x))  # while tokens are on their way
        out = combine(self.experts.forward)
        return out if shared is None else self._arithmetic.add(out, shared)

    def forward_without_tokens(self) -> None:
        """Makes the exchanges of `forward` without tokens of its own: this rank's experts compute the others' tokens."""
        assert self._ranks is not None, "ranks that share no experts exchange nothing"
        weights, ids = self._router.forward(self._no_tokens, None, self._no_ids)
        self._ranks.dispatch(self.moe_layer, self._no_tokens, ids, weights)(self.experts.forward)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Returns the weight slots, of experts only for those that the placement in force gives this rank."""
        slots = self._router.weight_slots()
        for expert in range(self._num_experts) if self._ranks is None else self._ranks.held(self.moe_layer):
            slots.update(self.experts.reserve(expert))
        return slots if self._shared is None else {**slots, **self._shared.weight_slots()}

    def _part(self, part: torch.Tensor) -> Rows:
        ranks = self._tensor
        return part if ranks.shard.count == 1 else RankPart(part.to(ranks.part_dtype(part.dtype)), ranks, part.dtype)


def _router(build: BuildContext, moe: MoeConfig, prefix: str, index: int) -> Router:
    names = build.names
    linear = build.linear(stacked([f"{prefix}.{names.router}"], [moe.num_experts], build.config.hidden_size, moe.bias, exact=True))
    bias, fused, fused_bias = (f"{prefix}.{name}" for name in (names.router_bias, names.fused_router, names.fused_router_bias))
    return Router(
        *(linear, moe.routing, bias, fused, fused_bias, build.device, build.arithmetic),
        bias_is_row=names.router_bias_is_row,
        table=f"{prefix}.{names.router_table}" if index in moe.by_table else "",
        vocabulary=build.config.vocab_size,
        norm=_router_norm(build, f"{prefix}.{names.router_scale}") if moe.beside_mlp else None,
        scales=f"{prefix}.{names.expert_scales}" if moe.beside_mlp else "",
    )


def _router_norm(build: BuildContext, name: str) -> RMSNorm:
    """Makes a norm whose weight is divided by the root of its size: logits then have the size of its elements."""
    config = build.config
    return RMSNorm(name, config.hidden_size, config.rms_eps, build.dtype, build.device, wide=True, scale=config.hidden_size**-0.5)


def _experts(build: BuildContext, moe: MoeConfig, prefix: str) -> Experts:
    names = build.names
    slots = moe.num_experts if build.expert_ranks is None else build.expert_ranks.slots
    shape = ExpertsShape(moe.num_experts, slots, build.config.hidden_size, build.expert_width(moe), moe.bias, moe.gate, moe.gated)
    gate_up, down = (tuple(f"{prefix}.{name}" for name in tensor) for tensor in names.fused_experts)
    tensors = ExpertNames(f"{prefix}.{names.experts}", names.expert_projections, (gate_up, down), names.expert_layout)
    return Experts(tensors, shape, build.experts(shape, tensors), build.dtype, build.device)


class SharedExperts:
    """The MLP that all tokens take. Where it has a gate, the sigmoid of a number of each token multiplies its output."""

    def __init__(self, build: BuildContext, moe: MoeConfig, prefix: str) -> None:
        names = build.names
        gate, up, down = (f"{prefix}.{names.shared_experts}.{name}" for name in names.shared_projections)
        self._mlp = Mlp(build, (gate, up, down), moe.shared_size, f"{prefix}.{names.fused_shared}", clamped=moe.gate)
        self._arithmetic = build.arithmetic
        self._gate: Linear | None = None
        if moe.shared_gate:
            self._gate = build.linear(stacked([f"{prefix}.{names.shared_gate}"], [1], build.config.hidden_size, exact=True))

    def forward_part(self, x: torch.Tensor) -> Rows:
        """x [T, hidden_size] -> [T, hidden_size], or this rank's part of that."""
        out = self._mlp.forward_part(x)
        if self._gate is not None:
            rows = out.part if isinstance(out, RankPart) else out
            self._arithmetic.multiply_rows(rows, self._gate.forward(x, torch.float32).flatten(), sigmoid=True)
        return out

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {**self._mlp.weight_slots(), **({} if self._gate is None else self._gate.weight_slots())}
