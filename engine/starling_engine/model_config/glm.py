"""GLM-4: half of each head is rotated, in pairs; gate and up are one matrix. Those of 2025 have norms around both parts."""

from dataclasses import replace

from starling_engine.model_config.definition import ModelDefinition, TensorNames, partial_rope, same_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

AROUND = TensorNames(attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")


def _traits(config: Fields) -> Traits:
    return Traits(qkv_bias=config.boolean("attention_bias", True), paired_rope=True)


GLM = ModelDefinition(architecture="GlmForCausalLM", traits=_traits, ropes=partial_rope(0.5), head_dim=128, rms_eps=1.5625e-07)
GLM4 = replace(GLM, architecture="Glm4ForCausalLM", layers=same_layers("both"), names=AROUND)
