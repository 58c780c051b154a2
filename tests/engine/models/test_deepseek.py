"""Reading DeepSeek's config.json: the sizes of latent attention, which layers have experts, and how tokens find them."""

from typing import Any

import pytest
from starling_engine.errors import ModelError
from starling_engine.kv.layer_specs import kv_specs
from starling_engine.kv.spec import LatentSpec
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig, Routing

from tests.engine.model_config.test_config import of


def deepseek(version: int, **changes: Any) -> ModelConfig:
    return of(f"DeepseekV{version}ForCausalLM", **{"num_key_value_heads": 4, "first_k_dense_replace": 4, **changes})


def test_a_latent_model_caches_one_latent_a_token() -> None:
    config = deepseek(3, kv_lora_rank=96, qk_rope_head_dim=32, qk_nope_head_dim=48)
    assert (config.head_dim, config.rotary_dims) == (80, (32,))
    specs = kv_specs(config, 16, "bfloat16")
    assert specs == dict.fromkeys(range(4), LatentSpec(16, 1, 128, 2))
    assert specs[0].layer_block_shape == (16, 128) and specs[0].layer_block_bytes == 16 * 128 * 2


def test_deepseek_defaults_are_those_of_transformers() -> None:
    for version, changes in ((2, {}), (3, {}), (3, {"rope_interleave": False, "q_lora_rank": 8})):
        mla = deepseek(version, head_dim=64, **changes).mla
        assert mla == MlaShape(
            num_heads=4,
            q_rank=changes.get("q_lora_rank", 0),
            kv_rank=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            interleaved=changes.get("rope_interleave", True),
        )


EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
}


@pytest.mark.parametrize(
    ("version", "changes", "routing"),
    [
        (2, {}, Routing(num_experts=8, top_k=2)),
        (2, {"topk_method": "greedy", "n_group": 4, "topk_group": 2}, Routing(num_experts=8, top_k=2)),
        (
            2,
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
            Routing(num_experts=8, top_k=2, num_groups=4, top_groups=2, scaling=16.0),
        ),
        (
            3,
            {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            Routing(
                num_experts=8,
                top_k=2,
                score="sigmoid",
                bias=True,
                num_groups=4,
                top_groups=2,
                group_score="best two",
                renormalize=True,
                scaling=2.5,
            ),
        ),
    ],
)
def test_experts_of_deepseek(version: int, changes: dict[str, Any], routing: Routing) -> None:
    assert deepseek(version, **EXPERTS, **changes).moe == MoeConfig(
        layers=(1, 2, 3), intermediate_size=48, routing=routing, shared_size=96
    )


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({"first_k_dense_replace": 0}, (0, 1, 2, 3)), ({"moe_layer_freq": 2}, (2,)), ({"first_k_dense_replace": 4}, None)],
)
def test_which_layers_of_deepseek_have_experts(changes: dict[str, Any], layers: tuple[int, ...] | None) -> None:
    moe = deepseek(2, **{**EXPERTS, **changes}).moe
    assert layers == (moe and moe.layers)


@pytest.mark.parametrize(
    ("version", "changes", "words"),
    [
        (2, {"topk_method": "noaux_tc"}, ["topk_method", "noaux_tc", "greedy, group_limited_greedy"]),
        (2, {"norm_topk_prob": True}, ["norm_topk_prob", "false"]),
        (2, {"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "softmax"]),
        (3, {"topk_method": "greedy"}, ["topk_method", "greedy", "noaux_tc"]),
        (3, {"scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        (3, {"n_group": 3}, ["n_group", "8", "3"]),
    ],
)
def test_a_choice_of_experts_that_is_not_known_is_named(version: int, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        deepseek(version, **{**EXPERTS, **changes})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, ["num_key_value_heads", "num_attention_heads (4)", "2"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim", "even", "7"]),
        ({"kv_lora_rank": 0}, ["kv_lora_rank", "at least 1"]),
    ],
)
def test_a_bad_field_of_a_latent_model_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        deepseek(3, **changes)
    assert all(word in str(caught.value) for word in words), caught.value
