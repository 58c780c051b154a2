"""Granite 3: Llama with multipliers of embeddings, scores, what each part adds, and logits."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def granite_traits(config: Fields) -> Traits:
    """Reads the multipliers, and which parts have biases."""
    bias = config.boolean("attention_bias", False)
    divisor = config.number("logits_scaling", 1.0)
    if not divisor:
        raise config.error("logits_scaling", "must be above 0")
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        attention_scale=config.number("attention_multiplier", 1.0),
        logit_divisor=divisor,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
    )


GRANITE = ModelDefinition(architecture="GraniteForCausalLM", traits=granite_traits)
