"""Arcee's AFM: Llama with squared ReLU in an MLP without a gate."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False), mlp_gate=False)


ARCEE = ModelDefinition(architecture="ArceeForCausalLM", traits=_traits, activation="relu2", rms_eps=1e-5)
