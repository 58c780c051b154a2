"""LFM3: LFM2 with norms around both parts, windows in some layers, and a gate of each head of attention."""

from collections.abc import Mapping
from dataclasses import replace

from starling_engine.model_config.definition import TensorNames, written_size
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import hybrid_layers
from starling_engine.model_config.layer import LayerConfig, Mixer, Norms
from starling_engine.model_config.lfm2 import LFM2
from starling_engine.model_config.rope import DEFAULT_THETA, RopeConfig, read_rope_of
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW, PERIOD, HEAD_DIM = 256, 4, 128
MIXERS: Mapping[str, Mixer] = {"conv": "short convolution", "full_attention": "attention", "sliding_attention": "attention"}
FULL_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
SLIDING_ROPE = {"rope_type": "default", "rope_theta": 1e4}
NAMES = TensorNames(
    norm="model.embedding_norm",
    attention_gate="self_attn.gate_proj",
    attention_norm="operator_norm",
    attention_out_norm="post_operator_norm",
    mlp_norm="ffn_norm",
    mlp_out_norm="post_ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    gate = config.boolean("use_attention_gate", True)
    return Traits(qkv_bias=bias, o_bias=bias, qk_norm="head", attention_gate="head" if gate else None)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which, without `layer_types`, every second one attends, and every fourth to all tokens.

    Those that slide have the second rotary embedding.
    """
    kinds = config.texts("layer_types") or [_usual_kind(layer) for layer in range(num_layers)]
    window = config.integer("sliding_window", DEFAULT_WINDOW)
    norms: Norms = "both" if config.boolean("use_sandwich_norm", True) else "before"
    layers = hybrid_layers(config, num_layers, kinds, norms, mixers=MIXERS)
    return tuple(
        replace(layer, window=window, rope=1) if kind == "sliding_attention" else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _usual_kind(layer: int) -> str:
    if layer % PERIOD == 2:
        return "full_attention"
    return "conv" if layer % PERIOD or not layer else "sliding_attention"


def _ropes(config: Fields, _theta: float) -> tuple[RopeConfig, ...]:
    nested = config.child("rope_parameters").with_defaults({"full_attention": FULL_ROPE, "sliding_attention": SLIDING_ROPE})
    return tuple(_rope(config, nested.child(kind)) for kind in ("full_attention", "sliding_attention"))


def _rope(config: Fields, fields: Fields) -> RopeConfig:
    partial = fields.number("partial_rotary_factor", 1.0)
    if not 0 < partial <= 1:
        raise fields.error("partial_rotary_factor", "must be above 0, and at most 1")
    return replace(read_rope_of(fields, config, DEFAULT_THETA, partial), head_dim=config.integer("head_dim", HEAD_DIM))


LFM3 = replace(
    LFM2,
    architecture="Lfm3ForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=_ropes,
    mlp_size=written_size,
    field_names={},
    head_dim=HEAD_DIM,
    names=NAMES,
)
