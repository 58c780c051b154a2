"""Bamba: Mamba-2 in all layers but a few, which attend and rotate half of each head."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, partial_rope
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mamba2 import read_mamba2
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    mlp_norm="pre_ff_layernorm",
    norm="model.final_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False))


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    attending = config.integers("attn_layer_indices")
    return tuple(LayerConfig(mixer="attention" if layer in attending else "mamba2") for layer in range(num_layers))


BAMBA = ModelDefinition(
    architecture="BambaForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=partial_rope(0.5),
    mamba2=read_mamba2,
    rms_eps=1e-5,
    names=NAMES,
)
