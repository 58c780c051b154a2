"""Hunyuan, dense (0.5B to 7B) and with experts (A13B): queries and keys are normalised behind the rotation."""

from collections.abc import Sequence
from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames, one_rope
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.moe import MoeConfig, Routing, checked
from starling_engine.model_config.rope import RopeConfig
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    fused_router="mlp.gate.wg",
    shared_experts="mlp.shared_mlp",
)
SUPPORTED = {"use_qk_norm": True, "use_cla": False, "use_mixed_mlp_moe": True}
"""Switches of the authors' code, and the only values that are served. They are the default."""


def _traits(config: Fields) -> Traits:
    for name, value in SUPPORTED.items():
        config.only(name, value)
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, qk_norm="rotated head")


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    """Returns the rotary embedding. "dynamic" scaling with `alpha` depends on no length: it is another base (NTK-aware)."""
    fields = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    if fields.text("rope_type", fields.text("type", "default")) != "dynamic":
        return one_rope(config, theta)
    size = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"), low=4)
    base = fields.number("rope_theta", config.number("rope_theta", theta), low=1.0)
    return (RopeConfig(theta=base * fields.number("alpha", low=1.0) ** (size / (size - 2))),)


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    width = config.integer("intermediate_size")
    routing = Routing(num_experts=_of_all(config, "num_experts"), top_k=_of_all(config, "moe_topk", 1), renormalize=True)
    return MoeConfig(
        layers=tuple(range(num_layers)),
        intermediate_size=_of_all(config, "moe_intermediate_size", width),
        routing=checked(config, routing),
        shared_size=_of_all(config, "num_shared_expert", 1) * width,
    )


def _of_all(config: Fields, name: str, default: int | None = None) -> int:
    """Reads a number that may be written once for each layer. Raises UnsupportedModel where layers differ."""
    value = config.get(name)
    if not isinstance(value, Sequence) or not value:
        return config.integer(name, default)
    if any(each != value[0] for each in value):
        raise UnsupportedModel(f"{config.source}: {name}: layers that differ are not supported")
    return Fields({name: value[0]}, config.source).integer(name)


HUNYUAN = ModelDefinition(architecture="HunYuanDenseV1ForCausalLM", traits=_traits, ropes=_ropes, names=NAMES, rms_eps=1e-5)
HUNYUAN_MOE = replace(HUNYUAN, architecture="HunYuanMoEV1ForCausalLM", moe=_moe)
