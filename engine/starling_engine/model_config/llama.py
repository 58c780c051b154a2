"""Llama 2 and 3, and what is trained in their shape."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False))


LLAMA = ModelDefinition(architecture="LlamaForCausalLM", traits=_traits)
