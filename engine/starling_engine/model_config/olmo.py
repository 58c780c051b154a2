"""OLMo 2 and 3: norms behind attention and MLP alone, queries and keys normalised over all heads; 3 has windows.

Most layers of OLMo Hybrid are Gated DeltaNets, with norms before both parts. OLMoE (arXiv 2409.02060) has norms before both parts,
too, and experts; FlexOlmo (arXiv 2507.07024) has experts and OLMo 2's norms.
"""

from dataclasses import replace

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames, one_rope, patterned_windows, same_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import DeltaNames, GatedDeltaConfig, hybrid_layers, read_gated_delta
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.moe import MoeConfig, Routing, checked, read_num_experts
from starling_engine.model_config.rope import DEFAULT_THETA, RopeConfig, read_ropes
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, DEFAULT_PATTERN = 4096, 4
GATE_EPS = 1e-5
"""Epsilon of the norms of Gated DeltaNets, whatever the model's is."""
HYBRID = TensorNames(
    delta=DeltaNames(
        z="linear_attn.g_proj",
        b="linear_attn.b_proj",
        a="linear_attn.a_proj",
        norm="linear_attn.o_norm",
        out="linear_attn.o_proj",
    )
)


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, qk_norm="width")


def _olmo3_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers that slide by `layer_types`; else all but every fourth do. These have the second rotary embedding."""
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    windows = patterned_windows(config, num_layers, window, DEFAULT_PATTERN)
    return tuple(LayerConfig(window=each, rope=1 if each else 0, norms="after") for each in windows)


def _olmo3_ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    return read_ropes(config, theta)


def _hybrid_layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which, without `layer_types`, every fourth attends, and at least the last one.

    With a base of null nothing is rotated.
    """
    written = ["linear_attention" if (layer + 1) % DEFAULT_PATTERN else "full_attention" for layer in range(num_layers)]
    if num_layers < DEFAULT_PATTERN:
        written[-1] = "full_attention"
    rope = 0 if _hybrid_ropes(config, DEFAULT_THETA) else None
    return tuple(
        each if each.has_state else replace(each, norms="after", rope=rope) for each in hybrid_layers(config, num_layers, written)
    )


def _hybrid_ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    scaling = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    place = scaling if "rope_theta" in scaling.values else config
    return one_rope(config, theta) if place.values.get("rope_theta", theta) is not None else ()


def _gated_delta(config: Fields) -> GatedDeltaConfig:
    """Reads the sizes, whose defaults follow from those of attention."""
    heads = config.integer("num_attention_heads")
    key_heads = config.integer("linear_num_key_heads", heads)
    key_dim = config.integer("linear_key_head_dim", max(1, 3 * config.integer("hidden_size") // (4 * key_heads)))
    defaults = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
        "linear_conv_kernel_dim": 4,
    }
    written = {name: config.values[name] for name in config.names()}
    delta = read_gated_delta(Fields({**defaults, **written}, config.source))
    scale = 2.0 if config.boolean("linear_allow_neg_eigval", True) else 1.0
    return replace(delta, rate_scale=scale, norm_eps=GATE_EPS)


def _olmoe_traits(config: Fields) -> Traits:
    if config.has("clip_qkv"):
        raise UnsupportedModel(f"{config.source}: clip_qkv is not supported; supported: null")
    return _traits(config)


def _moe(config: Fields, num_layers: int) -> MoeConfig:
    routing = Routing(
        num_experts=read_num_experts(config, "num_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok", 8),
        renormalize=config.boolean("norm_topk_prob", False),
    )
    size = config.integer("intermediate_size")
    return MoeConfig(layers=tuple(range(num_layers)), intermediate_size=size, routing=checked(config, routing))


OLMO2 = ModelDefinition(architecture="Olmo2ForCausalLM", traits=_traits, layers=same_layers("after"), rms_eps=1e-5)
OLMO3 = ModelDefinition(
    architecture="Olmo3ForCausalLM", traits=_traits, layers=_olmo3_layers, ropes=_olmo3_ropes, rope_theta=5e5, rms_eps=1e-5
)
OLMOE = ModelDefinition(architecture="OlmoeForCausalLM", traits=_olmoe_traits, moe=_moe, rms_eps=1e-5)
FLEX_OLMO = replace(
    OLMOE, architecture="FlexOlmoForCausalLM", traits=_traits, layers=same_layers("after"), rope_theta=5e5, rms_eps=1e-6
)
OLMO_HYBRID = ModelDefinition(
    architecture="OlmoHybridForCausalLM",
    traits=_traits,
    layers=_hybrid_layers,
    ropes=_hybrid_ropes,
    gated_delta=_gated_delta,
    names=HYBRID,
)
