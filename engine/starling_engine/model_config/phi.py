"""Phi-1, 1.5 and 2: attention and an MLP without a gate side by side behind one LayerNorm; biases everywhere."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, partial_rope, same_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(norm="model.final_layernorm", o="self_attn.dense", up="mlp.fc1", down="mlp.fc2")


def _traits(config: Fields) -> Traits:
    config.only("qk_layernorm", False)
    return Traits(qkv_bias=True, o_bias=True, mlp_bias=True, mlp_gate=False, head_bias=True, norm="biased layer")


PHI = ModelDefinition(
    architecture="PhiForCausalLM",
    traits=_traits,
    layers=same_layers("parallel"),
    ropes=partial_rope(0.5),
    activation="gelu_pytorch_tanh",
    activation_names={"gelu_new": "gelu_pytorch_tanh"},  # the same formula
    eps_field="layer_norm_eps",
    rms_eps=1e-5,
    names=NAMES,
)
