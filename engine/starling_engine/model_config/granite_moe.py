"""Granite 3 with experts (1B-A400M, 3B-A800M): its multipliers, experts as two tensors a layer, and maybe a shared one."""

from dataclasses import replace

from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.granite import GRANITE
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts

NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    fused_router="block_sparse_moe.router",
    experts="block_sparse_moe.experts",
    fused_experts=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ),
    shared_experts="shared_mlp",
    shared_projections=("gate_proj", "up_proj", "output_linear"),
    fused_shared="shared_mlp.input_linear",
)


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    routing = Routing(
        num_experts=read_num_experts(config, "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok", 2),
        renormalize=True,
    )
    return MoeConfig(
        layers=tuple(range(num_layers)),
        intermediate_size=config.integer("intermediate_size"),
        routing=checked(config, routing),
    )


def read_shared_moe(config: Fields, num_layers: int) -> MoeConfig:
    """Reads the experts, and the width of the one that all tokens share."""
    return replace(_moe(config, num_layers), shared_size=config.integer("shared_intermediate_size", 0, low=0))


GRANITE_MOE = replace(GRANITE, architecture="GraniteMoeForCausalLM", moe=_moe, names=NAMES)
GRANITE_MOE_SHARED = replace(GRANITE_MOE, architecture="GraniteMoeSharedForCausalLM", moe=read_shared_moe)
