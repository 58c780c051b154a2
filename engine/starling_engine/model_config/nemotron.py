"""Nemotron 3 and 4, and Minitron: LayerNorm by 1 + weight, squared ReLU in an MLP without a gate, half-rotated heads."""

from starling_engine.model_config.definition import ModelDefinition, partial_rope
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        mlp_gate=False,
        norm="biased layer, one plus weight",
    )


NEMOTRON = ModelDefinition(
    architecture="NemotronForCausalLM",
    traits=_traits,
    ropes=partial_rope(0.5),
    activation="relu2",
    eps_field="norm_eps",
    rms_eps=1e-5,
)
