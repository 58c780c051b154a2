"""GPT-2 (Radford et al. 2019): learnt positions, LayerNorm before both parts, an MLP without a gate, biases everywhere."""

from starling_engine.model_config.classifier import HeadShape, fixed_head
from starling_engine.model_config.definition import ModelDefinition, TensorNames, no_ropes
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

FIELD_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    fused_qkv="attn.c_attn",
    o="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    transposed=True,
    ignored=(".attn.bias", ".attn.masked_bias"),  # masks
)


def gpt2_traits(config: Fields) -> Traits:
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    return Traits(qkv_bias=True, o_bias=True, mlp_bias=True, mlp_gate=False, norm="biased layer", positions_from=0)


def gpt2_mlp_size(config: Fields, hidden_size: int) -> int:
    """Returns `n_inner`, or else four times the hidden size."""
    return config.integer("n_inner", 4 * hidden_size)


GPT2 = ModelDefinition(
    architecture="GPT2LMHeadModel",
    traits=gpt2_traits,
    layers=lambda _config, num_layers: (LayerConfig(rope=None),) * num_layers,
    ropes=no_ropes,
    mlp_size=gpt2_mlp_size,
    mlp_field="hidden_size",
    activation="gelu",
    activation_names={"gelu_new": "gelu_pytorch_tanh"},  # the same formula
    defaults={"hidden_act": "gelu_new", "max_position_embeddings": 1024},
    field_names=FIELD_NAMES,
    eps_field="layer_norm_epsilon",
    rms_eps=1e-5,
    tie_word_embeddings=True,
    token_head=fixed_head(HeadShape(pooling="last")),
    names=NAMES,
)
