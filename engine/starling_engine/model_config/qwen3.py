"""Qwen3, dense: RMSNorm on each query and key head, no biases unless the config asks for them."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.qwen2 import qwen_layers
from starling_engine.model_config.traits import Traits


def qwen3_traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, qk_norm="head")


QWEN3 = ModelDefinition(architecture="Qwen3ForCausalLM", traits=qwen3_traits, layers=qwen_layers, head_dim=128)
