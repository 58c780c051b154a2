"""MiniMax M2: queries and keys normalised over all heads, half-rotated heads, experts chosen by sigmoids with a learnt bias."""

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.rope import RopeConfig, read_rope
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    router="block_sparse_moe.gate",
    router_bias="block_sparse_moe.e_score_correction_bias",
    fused_router_bias="mlp.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    expert_projections=("w1", "w3", "w2"),
)
DEFAULT_HEAD_DIM = 128


def _traits(config: Fields) -> Traits:
    config.one_of("qk_norm_type", "per_layer")
    config.only("use_qk_norm", True)
    if any(kind != 1 for kind in config.integers("attn_type_list")):
        raise UnsupportedModel(f"{config.source}: attn_type_list: linear attention (0) is not supported; supported: 1")
    return Traits(qk_norm="width", num_draft_layers=config.integer("num_mtp_modules", 0, low=0))


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    """Returns the rotary embedding, of `rotary_dim` elements of a head where the config says so."""
    head_dim = config.integer("head_dim", DEFAULT_HEAD_DIM)
    return (read_rope(config, theta, config.integer("rotary_dim", head_dim) / head_dim),)


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    config.one_of("scoring_func", "sigmoid")
    if config.integer("shared_intermediate_size", 0, low=0):
        raise UnsupportedModel(f"{config.source}: shared_intermediate_size above 0 is not supported")
    routing = Routing(
        num_experts=read_num_experts(config, "num_local_experts", "num_experts"),
        top_k=config.integer("num_experts_per_tok", 8),
        score="sigmoid",
        bias=config.boolean("use_routing_bias", True),
        renormalize=True,
    )
    return MoeConfig(
        layers=tuple(range(num_layers)),
        intermediate_size=config.integer("intermediate_size"),
        routing=checked(config, routing),
    )


MINIMAX_M2 = ModelDefinition(
    architecture="MiniMaxM2ForCausalLM",
    traits=_traits,
    ropes=_ropes,
    moe=_moe,
    names=NAMES,
    head_dim=DEFAULT_HEAD_DIM,
    rope_theta=5e6,
)
