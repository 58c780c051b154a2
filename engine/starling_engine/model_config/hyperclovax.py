"""HyperCLOVA X SEED: Granite's multipliers, of which that of logits multiplies; maybe norms behind both parts, too."""

from dataclasses import replace

from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.granite import GRANITE, granite_traits
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(attention_out_norm="post_norm1", mlp_out_norm="post_norm2")


def _traits(config: Fields) -> Traits:
    traits = granite_traits(config)
    return replace(
        traits,
        attention_scale=traits.attention_scale if config.has("attention_multiplier") else None,
        logit_divisor=1 / traits.logit_divisor,
    )


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    return (LayerConfig(norms="both" if config.boolean("use_post_norm", True) else "before"),) * num_layers


HYPERCLOVAX = replace(GRANITE, architecture="HyperCLOVAXForCausalLM", traits=_traits, layers=_layers, names=NAMES)
