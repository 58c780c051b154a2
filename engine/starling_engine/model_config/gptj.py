"""GPT-J: attention and an MLP without a gate side by side behind one LayerNorm; a part of each head rotates in pairs."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames, same_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gpt2 import FIELD_NAMES, gpt2_mlp_size
from starling_engine.model_config.rope import RopeConfig
from starling_engine.model_config.traits import Traits

DEFAULT_ROTATED = 64
NAMES = TensorNames(
    embedding="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    o="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    attention_norm="ln_1",
    ignored=(".attn.bias", ".attn.masked_bias"),  # masks
)


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return (RopeConfig(theta=theta, partial=config.integer("rotary_dim", DEFAULT_ROTATED) / head_dim),)


def _traits(config: Fields) -> Traits:
    config.only("tie_word_embeddings", False)
    return Traits(mlp_bias=True, mlp_gate=False, head_bias=True, norm="biased layer", paired_rope=True)


GPTJ = ModelDefinition(
    architecture="GPTJForCausalLM",
    traits=_traits,
    layers=same_layers("parallel"),
    ropes=_ropes,
    mlp_size=gpt2_mlp_size,
    mlp_field="hidden_size",
    activation="gelu",
    activation_names={"gelu_new": "gelu_pytorch_tanh"},  # the same formula
    defaults={"hidden_act": "gelu_new"},
    field_names=FIELD_NAMES,
    eps_field="layer_norm_epsilon",
    rms_eps=1e-5,
    names=NAMES,
)
