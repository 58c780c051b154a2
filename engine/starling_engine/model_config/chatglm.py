"""ChatGLM 2 and 3 and GLM-4 9B under its authors' names: half of each head rotates in pairs; matrices are fused."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.rope import RopeConfig
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    embedding="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    lm_head="transformer.output_layer",
    layer="transformer.encoder.layers.{}",
    fused_qkv="self_attention.query_key_value",
    o="self_attention.dense",
    fused_gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=("rotary_pos_emb.inv_freq",),
)
SWITCHES = {"rmsnorm": True, "post_layer_norm": True, "apply_residual_connection_post_layernorm": False, "add_bias_linear": False}


def _traits(config: Fields) -> Traits:
    for name, value in SWITCHES.items():
        config.only(name, value)
    bias = config.boolean("add_qkv_bias", False)
    return Traits(qkv_bias=bias, paired_rope=True)


def _kv_heads(config: Fields, num_heads: int) -> int:
    return config.integer("multi_query_group_num", 1) if config.boolean("multi_query_attention", False) else num_heads


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    return (RopeConfig(theta=theta * config.number("rope_ratio", 1.0, low=1e-3), partial=0.5),)


CHATGLM = ModelDefinition(
    architecture="ChatGLMForCausalLM",
    traits=_traits,
    kv_heads=_kv_heads,
    ropes=_ropes,
    field_names={
        "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length",
    },
    eps_field="layernorm_epsilon",
    rms_eps=1e-5,
    names=NAMES,
)
