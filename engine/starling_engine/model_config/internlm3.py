"""InternLM3: Llama, whose biases have other names in its config."""

from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits


def _traits(config: Fields) -> Traits:
    """Reads `qkv_bias` and `bias`, which is that of all other matrices, or the names that transformers writes for them."""
    bias = config.boolean("bias", config.boolean("mlp_bias", False))
    return Traits(qkv_bias=config.boolean("qkv_bias", config.boolean("attention_bias", False)), o_bias=bias, mlp_bias=bias)


INTERNLM3 = ModelDefinition(architecture="InternLM3ForCausalLM", traits=_traits, head_dim=128, rms_eps=1e-5)
