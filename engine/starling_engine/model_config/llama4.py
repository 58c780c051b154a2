"""Llama 4 (Scout, Maverick) as a text model: experts with scaled inputs, layers without rotation whose queries have a temperature.

Layers that are rotated attend in chunks of the sequence.
"""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, Temperature
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.smollm3 import rotated_layers
from starling_engine.model_config.traits import Traits

DEFAULT_CHUNK = 8192
NAMES = TensorNames(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    fused_router="feed_forward.router",
    experts="feed_forward.experts",
    fused_experts=(("feed_forward.experts.gate_up_proj",), ("feed_forward.experts.down_proj",)),
    expert_layout="columns",
    shared_experts="feed_forward.shared_expert",
)


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    norm = config.boolean("use_qk_norm", True)
    return Traits(qkv_bias=bias, o_bias=bias, paired_rope=True, qk_norm="head without weight" if norm else None)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    rotated = rotated_layers(config, num_layers)
    kinds = config.texts("layer_types") or ["chunked_attention" if each else "full_attention" for each in rotated]
    if len(kinds) != num_layers or not {*kinds} <= {"chunked_attention", "full_attention"}:
        raise config.error("layer_types", f"must have {num_layers} entries, chunked_attention or full_attention")
    chunk = config.integer("attention_chunk_size", DEFAULT_CHUNK)
    plain = LayerConfig(rope=None, temperature=_temperature(config))
    return tuple(
        replace(LayerConfig() if each else plain, attention_chunk=chunk if kind == "chunked_attention" else 0)
        for each, kind in zip(rotated, kinds, strict=True)
    )


def _temperature(config: Fields) -> Temperature | None:
    if not config.boolean("attn_temperature_tuning", True):
        return None
    return Temperature(step=config.integer("floor_scale", DEFAULT_CHUNK), scale=config.number("attn_scale", 0.1))


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    """Reads experts; None where no layer has them, as in Llama Guard 4, whose step is 0."""
    step = config.integer("interleave_moe_layer_step", 1, low=0)
    every = range(step - 1, num_layers, step) if step else ()
    listed = config.integers("moe_layers") if config.has("moe_layers") else every
    layers = tuple(layer for layer in range(num_layers) if layer in listed)
    if not layers:
        return None
    top_k = config.integer("num_experts_per_tok", 1)
    if top_k != 1:
        raise UnsupportedModel(f"{config.source}: num_experts_per_tok above 1 is not supported for this architecture; supported: 1")
    experts = read_num_experts(config, "num_local_experts", "num_experts")
    size = config.integer("intermediate_size")
    return MoeConfig(
        layers=layers,
        intermediate_size=size,
        routing=checked(config, Routing(num_experts=experts, top_k=top_k, score="sigmoid")),
        shared_size=size,
        scaled_inputs=True,
    )


LLAMA4 = ModelDefinition(
    architecture="Llama4ForCausalLM",
    traits=_traits,
    layers=_layers,
    moe=_moe,
    head_dim=128,
    rope_theta=5e5,
    rms_eps=1e-5,
    mlp_field="intermediate_size_mlp",
    names=NAMES,
)
