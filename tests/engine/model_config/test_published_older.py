"""What is read of configs of 2021 to 2024 as their authors published them, and what is refused of them."""

from typing import Any

import pytest
from starling_engine.errors import ModelError
from starling_engine.model_config.config import ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import DistanceEmbeddings

FALCON_7B = {
    "alibi": False,
    "architectures": ["FalconForCausalLM"],
    "bias": False,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
STARCODER = {
    "activation_function": "gelu",
    "architectures": ["GPTBigCodeForCausalLM"],
    "multi_query": True,
    "n_embd": 6144,
    "n_head": 48,
    "n_inner": 24576,
    "n_layer": 40,
    "n_positions": 8192,
    "scale_attn_weights": True,
    "vocab_size": 49152,
}
GPT_J_6B = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary_dim": 64,
    "tie_word_embeddings": False,
    "vocab_size": 50400,
}
GPT_NEO_1_3B = {
    "activation_function": "gelu_new",
    "architectures": ["GPTNeoForCausalLM"],
    "attention_types": [[["global", "local"], 12]],
    "hidden_size": 2048,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "num_heads": 16,
    "num_layers": 24,
    "vocab_size": 50257,
    "window_size": 256,
}
GLM_4_9B = {
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["ChatGLMModel"],
    "ffn_hidden_size": 13696,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 40,
    "padded_vocab_size": 151552,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 131072,
    "tie_word_embeddings": False,
}
DEBERTA_3_BASE = {
    "architectures": ["DebertaV2ForSequenceClassification"],
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-07,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": 768,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(Fields({**config, **changes}, "config.json"), Fields({}, "generation_config.json"))


@pytest.mark.parametrize(
    ("config", "heads", "width", "length", "rotated"),
    [
        (FALCON_7B, (71, 1, 64), 18176, 2048, (64,)),
        (STARCODER, (48, 1, 128), 24576, 8192, ()),
        (GPT_J_6B, (16, 16, 256), 16384, 2048, (64,)),
        (GPT_NEO_1_3B, (16, 16, 128), 8192, 2048, ()),
        (GLM_4_9B, (32, 2, 128), 13696, 131072, (64,)),
        (DEBERTA_3_BASE, (12, 12, 64), 3072, 512, ()),
    ],
)
def test_sizes(config: dict[str, Any], heads: tuple[int, int, int], width: int, length: int, rotated: tuple[int, ...]) -> None:
    model = read(config)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == heads
    assert (model.intermediate_size, model.max_position, model.rotary_dims) == (width, length, rotated)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [0, 256] * 12),
        ({"attention_types": [[["global"], 23], [["local"], 1]]}, [0] * 23 + [256]),
        ({"attention_types": [[["global"], 24]], "attention_layers": ["local"] * 24}, [256] * 24),
        ({"attention_types": None}, [0, 256] * 12),
    ],
)
def test_layers_of_gpt_neo_slide_by_runs_of_kinds(fields: dict[str, Any], windows: list[int]) -> None:
    assert [layer.window for layer in read(GPT_NEO_1_3B, **fields).layers] == windows


def test_deberta_has_buckets_of_distances_and_no_positions() -> None:
    traits = read(DEBERTA_3_BASE).traits
    assert traits.distances == DistanceEmbeddings(span=256, buckets=True, longest=512, normed=True)
    assert traits.positions_from is None and not traits.token_types
    assert read(DEBERTA_3_BASE, position_buckets=-1).traits.distances == DistanceEmbeddings(512, False, 512, True)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (FALCON_7B, {"alibi": True}, ["alibi: true", "Falcon RW"]),
        (FALCON_7B, {"new_decoder_architecture": True, "num_kv_heads": 1}, ["num_ln_in_parallel_attn: 2", "supported: 1"]),
        (STARCODER, {"multi_query": False}, ["multi_query: false"]),
        (GPT_J_6B, {"tie_word_embeddings": True}, ["tie_word_embeddings: true"]),
        (GPT_NEO_1_3B, {"attention_types": [[["global"], 23]]}, ["attention_types", "num_layers (24)"]),
        (GPT_NEO_1_3B, {"attention_types": [["global", 24]]}, ["attention_types", "lists of kinds"]),
        (GPT_NEO_1_3B, {"attention_types": 12}, ["attention_types", "lists of kinds"]),
        (GLM_4_9B, {"rmsnorm": False}, ["rmsnorm: false"]),
        (DEBERTA_3_BASE, {"share_att_key": False}, ["share_att_key: false"]),
        (DEBERTA_3_BASE, {"pos_att_type": "c2p"}, ["pos_att_type 'c2p'", "p2c|c2p"]),
        (DEBERTA_3_BASE, {"conv_kernel_size": 3}, ["conv_kernel_size", "DeBERTa 2"]),
        (DEBERTA_3_BASE, {"embedding_size": 128}, ["embedding_size must be hidden_size"]),
        (DEBERTA_3_BASE, {"position_buckets": 2000}, ["position_buckets", "511"]),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(config, **changes)
    assert all(word in str(caught.value) for word in ["config.json", *words]), caught.value
