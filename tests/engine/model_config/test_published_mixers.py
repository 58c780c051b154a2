"""Published configs whose layers have other states than a Gated DeltaNet's, and what of them is refused."""

from typing import Any

import pytest
from starling_engine.errors import ModelError
from starling_engine.kv.layer_specs import kv_specs, state_specs
from starling_engine.kv.spec import LatentSpec, StatePart, StateSpec
from starling_engine.model_config.config import ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.model_config.moe import MoeConfig, Routing
from starling_engine.topology.shard import Shard

LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
LFM2_8B_A1B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv" for at in range(24)],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [at for at in range(1, 27) if at % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(Fields(config | changes, "config.json"), Fields({}, "generation_config.json"))


@pytest.mark.parametrize(
    ("config", "width", "attending"),
    [(LFM2_1_2B, 8192, [2, 5, 8, 10, 12, 14]), (LFM2_8B_A1B, 7168, [2, 6, 10, 14, 18, 21])],
    ids=["lfm2-1.2b", "lfm2-8b-a1b"],
)
def test_lfm2(config: dict[str, Any], width: int, attending: list[int]) -> None:
    model = read(config)
    assert (model.intermediate_size, model.rms_eps, model.ropes[0].theta, model.tie_word_embeddings) == (width, 1e-5, 1e6, True)
    assert sorted(kv_specs(model, 16, "bfloat16")) == attending
    assert state_specs(model)[0] == StateSpec((StatePart(2, (2048,)),)), "the last two inputs, and no matrix"
    assert state_specs(model, Shard(1, 4))[0] == StateSpec((StatePart(2, (512,)),))


def test_the_experts_of_lfm2() -> None:
    routing = Routing(num_experts=32, top_k=4, score="sigmoid", bias=True, renormalize=True)
    assert read(LFM2_8B_A1B).moe == MoeConfig(layers=tuple(range(2, 24)), intermediate_size=1792, routing=routing)
    moe = read(LFM2_8B_A1B, use_expert_bias=False).moe
    assert moe is not None and not moe.routing.bias


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ffn_dim_multiplier": 1.1}, 9216),
        ({"block_ff_dim": 10000}, 6912),
        ({"intermediate_size": 6144}, 4096),
    ],
)
def test_the_width_of_lfm2s_mlp(changes: dict[str, Any], width: int) -> None:
    """Transformers 5.23 computes it so."""
    assert read(LFM2_1_2B, **changes).intermediate_size == width


def test_all_layers_attend_where_none_are_named() -> None:
    model = read(LFM2_1_2B, full_attn_idxs=None)
    assert not model.has_state and model.short_conv is None


def test_kimi_linear() -> None:
    model = read(KIMI_LINEAR_48B)
    attending = [3, 7, 11, 15, 19, 23, 26]
    assert [at for at, layer in enumerate(model.layers) if not layer.has_state] == attending
    assert sorted(kv_specs(model, 16, "bfloat16")) == attending
    assert kv_specs(model, 16, "bfloat16")[3] == LatentSpec(16, 1, 512 + 64, 2)
    assert (model.max_position, model.ropes, model.named_ropes, model.rms_eps) == (1048576, (), {None}, 1e-5)
    assert model.gated_delta == GatedDeltaConfig(
        key_heads=32, value_heads=32, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-5, gate_rank=128
    )
    assert state_specs(model, Shard(1, 4))[0] == StateSpec((StatePart(8, (128, 128)), StatePart(3, (3 * 8 * 128,))))
    routing = Routing(num_experts=256, top_k=8, score="sigmoid", bias=True, group_score="best two", renormalize=True, scaling=2.446)
    assert model.moe == MoeConfig(layers=tuple(range(1, 27)), intermediate_size=1024, routing=routing, shared_size=1024)


def test_layers_of_kimi_linear_as_transformers_writes_them() -> None:
    kinds = {"layer_types": ["linear_attention"] * 26 + ["full_attention"], "mlp_layer_types": ["sparse"] * 2 + ["dense"] * 25}
    model = read(KIMI_LINEAR_48B, **kinds, linear_attn_config=None, linear_num_heads=4, linear_head_dim=8, linear_conv_kernel_dim=3)
    assert [layer.mixer for layer in model.layers] == ["kimi delta attention"] * 26 + ["attention"]
    assert model.moe is not None and model.moe.layers == (0, 1)
    assert model.gated_delta is not None and model.gated_delta.channels == 3 * 4 * 8 and model.gated_delta.kernel == 3
    without = read(KIMI_LINEAR_48B, linear_attn_config=None)
    assert [at for at, layer in enumerate(without.layers) if not layer.has_state] == [4, 8, 12, 16, 20, 24]
    assert without.gated_delta == read(KIMI_LINEAR_48B).gated_delta


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (LFM2_1_2B, {"full_attn_idxs": "all"}, ["full_attn_idxs", "list of integers"]),
        (LFM2_1_2B, {"layer_types": ["mamba"] * 16}, ["'mamba'", "conv, full_attention"]),
        (LFM2_1_2B, {"conv_L_cache": 1}, ["conv_L_cache", "at least 2"]),
        (LFM2_1_2B, {"block_ffn_dim_multiplier": 0}, ["block_ffn_dim_multiplier", "at least 1"]),
        (LFM2_1_2B, {"is_causal": False}, ["both directions", "recurrent state"]),
        (LFM2_8B_A1B, {"num_experts_per_tok": 33}, ["num_experts_per_tok", "at most 32"]),
        (KIMI_LINEAR_48B, {"mla_use_nope": False}, ["mla_use_nope: false"]),
        (KIMI_LINEAR_48B, {"moe_router_activation_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        (KIMI_LINEAR_48B, {"linear_attn_config": {"full_attn_layers": [4]}}, ["linear_attn_config", "all layers from 1 to"]),
        (KIMI_LINEAR_48B, {"linear_attn_config": {"num_heads": 0}}, ["linear_attn_config: num_heads", "at least 1"]),
        (KIMI_LINEAR_48B, {"linear_attn_config": {"head_dim": 1 << 16}}, ["linear_attn_config: head_dim", "at most 32768"]),
        (KIMI_LINEAR_48B, {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "27"]),
        (KIMI_LINEAR_48B, {"mlp_layer_types": ["wide"] * 27}, ["mlp_layer_types", "dense or sparse"]),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(config, **changes)
    assert all(word in str(caught.value) for word in ["config.json", *words]), caught.value
