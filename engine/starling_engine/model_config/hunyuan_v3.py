"""Hunyuan 3: Llama with normalised queries and keys; experts are chosen by sigmoids with a learnt bias, beside a shared one."""

from starling_engine.model_config.deepseek import listed_expert_layers
from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    router="mlp.router.gate",
    router_bias="mlp.expert_bias",
    fused_router_bias="mlp.e_score_correction_bias",
    shared_experts="mlp.shared_mlp",
)
SWITCHES = ("qk_norm", "route_norm", "moe_router_enable_expert_bias", "moe_router_use_sigmoid")
"""Switches of the authors' config, all of which are on."""


def _traits(config: Fields) -> Traits:
    for name in SWITCHES:
        config.only(name, True)
    bias = config.boolean("attention_bias", False)
    drafts = config.integer("num_nextn_predict_layers", 1, low=0)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False), qk_norm="head", num_draft_layers=drafts)


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    layers = listed_expert_layers(config, num_layers)
    if layers is None:
        layers = tuple(range(config.integer("first_k_dense_replace", 1, low=0), num_layers))
    if not layers:
        return None
    routing = Routing(
        num_experts=read_num_experts(config, "num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok", 8),
        score="sigmoid",
        bias=True,
        renormalize=True,
        scaling=config.number("router_scaling_factor", 2.826),
    )
    width = config.integer("expert_hidden_dim" if config.has("expert_hidden_dim") else "moe_intermediate_size")
    return MoeConfig(
        layers=layers,
        intermediate_size=width,
        routing=checked(config, routing),
        shared_size=width * config.integer("num_shared_experts", 1, low=0),
    )


HUNYUAN_V3 = ModelDefinition(
    architecture="HYV3ForCausalLM", traits=_traits, moe=_moe, names=NAMES, head_dim=128, rope_theta=11_158_840.0, rms_eps=1e-5
)
