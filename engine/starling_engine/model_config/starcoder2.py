"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere, and a sliding window."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, one_window
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(up="mlp.c_fc", down="mlp.c_proj")


def _traits(config: Fields) -> Traits:
    bias = config.boolean("use_bias", True)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=bias, mlp_gate=False, norm="biased layer")


STARCODER2 = ModelDefinition(
    architecture="Starcoder2ForCausalLM",
    traits=_traits,
    layers=one_window,
    activation="gelu_pytorch_tanh",
    eps_field="norm_epsilon",
    rms_eps=1e-5,
    tie_word_embeddings=True,
    names=NAMES,
)
