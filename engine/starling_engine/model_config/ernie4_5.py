"""ERNIE 4.5: heads rotate in pairs; the larger ones have experts, chosen with a learnt bias, and shared ones."""

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    router_bias="mlp.moe_statics.e_score_correction_bias",
    fused_router_bias="mlp.gate.moe_statics.e_score_correction_bias",
    router_bias_is_row=True,
    left_out=("model.mtp_",),
)
LEAST_SUM = 1e-12
"""Least sum by which affinities are divided. No chosen ones have so small a sum in practice, and 0 is avoided anyway."""


def _traits(config: Fields) -> Traits:
    bias = config.boolean("use_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=bias, paired_rope=True)


def _moe_traits(config: Fields) -> Traits:
    config.only("use_bias", False, of="with experts")
    return Traits(paired_rope=True)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    """Reads the experts: every `moe_layer_interval`-th layer between two indices has some. An end of -1 is the last layer."""
    step, first = config.integer("moe_layer_interval", 1), config.integer("moe_layer_start_index", 1, low=0)
    end = config.integer("moe_layer_end_index", -1, low=-1)
    last = num_layers - 1 if end < 0 else min(end, num_layers - 1)
    layers = tuple(layer for layer in range(first, last + 1) if (layer + 1) % step == 0)
    if not layers:
        return None
    if config.number("moe_norm_min", LEAST_SUM) > LEAST_SUM:
        raise UnsupportedModel(f"{config.source}: moe_norm_min above {LEAST_SUM:g} is not supported")
    routing = Routing(
        num_experts=read_num_experts(config, "moe_num_experts", "num_experts"),
        top_k=config.integer("moe_k", config.integer("num_experts_per_tok", 6)),
        bias=True,
        renormalize=True,
    )
    size = config.integer("moe_intermediate_size")
    shared = config.integer("moe_num_shared_experts", 2, low=0)
    return MoeConfig(layers=layers, intermediate_size=size, routing=checked(config, routing), shared_size=shared * size)


ERNIE4_5 = ModelDefinition(
    architecture="Ernie4_5ForCausalLM", traits=_traits, head_dim=128, rope_theta=5e5, rms_eps=1e-5, tie_word_embeddings=True
)
ERNIE4_5_MOE = ModelDefinition(
    architecture="Ernie4_5_MoeForCausalLM",
    traits=_moe_traits,
    moe=_moe,
    names=NAMES,
    rope_theta=5e5,
    rms_eps=1e-5,
    tie_word_embeddings=True,
)
