"""Falcon (7B, 11B): attention and an MLP without a gate side by side behind one LayerNorm.

40B and 180B, which have two, are refused.
"""

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

QKV = "self_attention.query_key_value"
NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    q=QKV,
    k=QKV,
    v=QKV,
    o="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=("rotary_emb.inv_freq", "rotary.inv_freq"),
)


def _traits(config: Fields) -> Traits:
    config.only("alibi", False, of="Falcon RW")
    bias = config.boolean("bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=bias, mlp_gate=False, norm="biased layer")


def _kv_heads(config: Fields, num_heads: int) -> int:
    if _is_new(config):
        return config.integer("num_kv_heads", num_heads)
    return 1 if config.boolean("multi_query", True) else num_heads


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    is_new = _is_new(config)
    if is_new and config.integer("num_ln_in_parallel_attn", 2) != 1:
        raise UnsupportedModel(f"{config.source}: num_ln_in_parallel_attn: 2 (Falcon 40B) is not supported; supported: 1")
    return (LayerConfig(norms="parallel" if is_new or config.boolean("parallel_attn", True) else "before"),) * num_layers


def _is_new(config: Fields) -> bool:
    return config.boolean("new_decoder_architecture", False)


def _mlp_size(config: Fields, hidden_size: int) -> int:
    return config.integer("ffn_hidden_size", 4 * hidden_size)


FALCON = ModelDefinition(
    architecture="FalconForCausalLM",
    traits=_traits,
    layers=_layers,
    kv_heads=_kv_heads,
    mlp_size=_mlp_size,
    mlp_field="hidden_size",
    activation="gelu",
    field_names={"hidden_act": "activation"},
    defaults={"max_position_embeddings": 2048},
    eps_field="layer_norm_epsilon",
    rms_eps=1e-5,
    tie_word_embeddings=True,
    names=NAMES,
)
