"""Apertus: Llama with normalised queries and keys, and an MLP without a gate whose activation (xIELU) has learnt parameters."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_gate=False, qk_norm="head")


APERTUS = ModelDefinition(
    architecture="ApertusForCausalLM", traits=_traits, activation="xielu", rope_theta=12e6, rms_eps=1e-5, names=NAMES
)
