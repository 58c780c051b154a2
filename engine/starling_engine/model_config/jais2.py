"""Jais 2: Llama with LayerNorm and squared ReLU in an MLP without a gate, and biases everywhere."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", True)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", True), mlp_gate=False, norm="biased layer")


JAIS2 = ModelDefinition(
    architecture="Jais2ForCausalLM", traits=_traits, activation="relu2", eps_field="layer_norm_eps", rms_eps=1e-5
)
