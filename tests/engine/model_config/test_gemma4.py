"""Gemma 4's configs: as Google publishes them, and as transformers writes them."""

from typing import Any

import pytest
from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.model_config.config import ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import KVHeads
from starling_engine.model_config.moe import TanhGelu
from starling_engine.model_config.rope import ProportionalScaling
from starling_engine.model_config.traits import LayerInputs
from starling_engine.topology.shard import Shard

SLIDING, FULL = "sliding_attention", "full_attention"
ROPES = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}
DENSE_31B = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "vocab_size": 262144,
    "rope_parameters": ROPES,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}
SMALL_E2B = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
    "max_position_embeddings": 131072,
    "vocab_size": 262144,
    "rope_parameters": ROPES,
}


def of(text: dict[str, Any], **changes: Any) -> ModelConfig:
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {**text, **changes}, "vision_config": {}}
    return parse_model_config(Fields(config, "config.json"), Fields({}, "generation_config.json"))


def test_the_dense_model_has_heads_of_two_sizes() -> None:
    model = of(DENSE_31B)
    assert model.architecture == "Gemma4ForCausalLM" and model.causal and model.tie_word_embeddings
    sliding, full = model.layers[0], model.layers[5]
    assert (sliding.window, sliding.keys_are_values, model.heads_of(sliding)) == (1024, False, KVHeads(16, 256))
    assert (full.window, full.keys_are_values, model.heads_of(full)) == (0, True, KVHeads(4, 512))
    assert model.rotary_dims == (128, 256) and model.ropes[full.rope or 0].scaling == ProportionalScaling(factor=1.0)
    assert (model.traits.attention_scale, model.traits.logit_cap, model.traits.layer_inputs) == (1.0, 30.0, None)


def test_the_small_model_has_layers_that_read_another_one_s_cache() -> None:
    model = of(SMALL_E2B)
    assert [layer.cache_of for layer in model.layers] == [None] * 15 + ([13] * 4 + [14]) * 4
    assert [layer.mlp_size for layer in model.layers] == [None] * 15 + [12288] * 20
    assert model.traits.layer_inputs == LayerInputs(size=256, rows=262144) and model.widest_mlp == 12288
    assert model.heads_of(model.layers[4]) == KVHeads(1, 512) and not model.layers[4].keys_are_values


def test_stages_keep_layers_with_those_whose_cache_they_read() -> None:
    model = of(SMALL_E2B, hidden_size_per_layer_input=0)
    assert [model.stage_layers(Shard(at, 2)) for at in range(2)] == [range(13), range(13, 35)]


def test_experts_stand_beside_the_mlp_of_each_layer() -> None:
    model = of(DENSE_31B, enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704)
    assert model.moe is not None and model.moe.beside_mlp and model.moe.gate == TanhGelu()
    assert (model.moe.routing.top_k, model.moe.routing.renormalize, len(model.moe.layers)) == (8, True, 60)
    assert {layer.feed_forward for layer in model.layers} == {"mlp and experts"}


def test_the_last_layer_sees_all_tokens_and_ropes_have_defaults() -> None:
    model = of(DENSE_31B, layer_types=None, num_hidden_layers=8, rope_parameters=None)
    assert [layer.window > 0 for layer in model.layers] == [True] * 5 + [False, True, False]
    assert model.ropes == of(DENSE_31B).ropes


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_kv_shared_layers": 56}, ModelError, "num_kv_shared_layers must leave a layer of each kind"),
        ({"num_global_key_value_heads": 5}, ModelError, "heads of a layer must have"),
        ({"per_layer_config": {"5": {"head_dim": 128}}}, UnsupportedModel, "heads of several sizes in layers of one kind"),
        ({"top_k_experts": 0, "enable_moe_block": True, "num_experts": 4}, ModelError, "top_k_experts must be"),
    ],
)
def test_what_is_not_possible_is_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        of(DENSE_31B, **changes)
