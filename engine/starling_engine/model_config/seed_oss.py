"""Seed-OSS: Llama with biases on queries, keys and values."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    return Traits(
        qkv_bias=config.boolean("attention_bias", True),
        o_bias=config.boolean("attention_out_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
    )


SEED_OSS = ModelDefinition(architecture="SeedOssForCausalLM", traits=_traits, head_dim=128)
