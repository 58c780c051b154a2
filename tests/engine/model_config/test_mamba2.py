"""Mamba-2 as configs describe it: which layers have it, its sizes, and what is refused."""

import math
from typing import Any

import pytest
from starling_engine.errors import ModelError
from starling_engine.kv.layer_specs import kv_specs, state_specs
from starling_engine.kv.spec import StatePart, StateSpec
from starling_engine.model_config.mamba2 import Mamba2Config
from starling_engine.topology.shard import Shard

from tests.engine.model_config.test_config import of

LINEAR, FULL = "linear_attention", "full_attention"
GRANITE = {"num_local_experts": 0, "shared_intermediate_size": 32, "mamba_n_heads": 8, "rms_norm_eps": 1e-5}
GRANITE_H = {**GRANITE, "layer_types": ["mamba", "attention"] * 2}


@pytest.mark.parametrize(("mamba", "attention"), [("mamba", "attention"), (LINEAR, FULL)])
def test_layers_of_granite_4_are_mamba_or_attend(mamba: str, attention: str) -> None:
    config = of("GraniteMoeHybridForCausalLM", **GRANITE, layer_types=[mamba, attention, mamba, mamba])
    found = [(layer.has_state, layer.attends, layer.rope) for layer in config.layers]
    assert found == [(True, False, None), (False, True, None), (True, False, None), (True, False, None)]
    head_dim = 2 * config.hidden_size // 8
    assert config.mamba2 == Mamba2Config(heads=8, head_dim=head_dim, groups=1, state_size=256, kernel=4, norm_eps=1e-5)
    assert config.intermediate_size == 32 and config.moe is None


def test_granite_4_may_attend_in_all_layers() -> None:
    config = of("GraniteMoeHybridForCausalLM", **GRANITE, layer_types=[FULL] * 4, position_embedding_type="rope")
    assert not config.has_state and config.mamba2 is None and [layer.rope for layer in config.layers] == [0] * 4


def test_ranks_have_heads_and_the_groups_that_these_need() -> None:
    """A rank of four has two of eight heads; of two groups it shares one with another rank."""
    config = of("GraniteMoeHybridForCausalLM", **GRANITE_H, mamba_n_groups=2, mamba_d_state=16)
    dim = 2 * config.hidden_size // 8
    whole = StateSpec((StatePart(8, (16, dim)), StatePart(3, (8 * dim + 2 * 2 * 16,))))
    quarter = StateSpec((StatePart(2, (16, dim)), StatePart(3, (2 * dim + 2 * 16,))))
    assert state_specs(config) == {0: whole, 2: whole} and state_specs(config, Shard(1, 4)) == {0: quarter, 2: quarter}
    assert sorted(kv_specs(config, 16, "bfloat16")) == [1, 3]


@pytest.mark.parametrize(
    ("written", "limits"),
    [
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.001, {"__float__": "Infinity"}], (0.001, math.inf)),
        ([0.25, 2], (0.25, 2.0)),
        (None, (0.0, math.inf)),
    ],
)
def test_limits_of_step_sizes(written: Any, limits: tuple[float, float]) -> None:
    config = of("GraniteMoeHybridForCausalLM", **GRANITE_H, time_step_limit=written)
    assert config.mamba2 is not None and config.mamba2.dt_limits == limits


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_n_heads": 7}, ["mamba_n_heads", "must divide"]),
        ({"mamba_d_head": 24}, ["mamba_d_head", "must be"]),
        ({"mamba_n_groups": 3}, ["mamba_n_groups", "mamba_n_heads (8)"]),
        ({"mamba_d_conv": 1}, ["mamba_d_conv", "at least 2"]),
        ({"mamba_d_state": 1 << 21}, ["mamba_d_state", "at most"]),
        ({"time_step_limit": [2.0, 1.0]}, ["time_step_limit", "two numbers"]),
        ({"time_step_limit": ["0", 1.0]}, ["time_step_limit", "two numbers"]),
        ({"time_step_limit": [0.0, 10**400]}, ["time_step_limit", "two numbers"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"layer_types": ["moe"] * 4}, ["'moe'", "mamba, linear_attention, attention, full_attention"]),
        ({"position_embedding_type": "learned"}, ["position_embedding_type 'learned'", "nope, rope"]),
    ],
)
def test_what_granite_4_may_not_have_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        of("GraniteMoeHybridForCausalLM", **{**GRANITE_H, **changes})
    assert all(word in str(caught.value) for word in words), caught.value


def test_bamba_attends_where_it_says() -> None:
    config = of("BambaForCausalLM", mamba_n_heads=8, attn_layer_indices=[2], rope_theta=1e4)
    assert [layer.attends for layer in config.layers] == [False, False, True, False]
    assert config.ropes[0].rotary_dim(16) == 8


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("BambaForCausalLM", {"mamba_n_heads": 8}),
        ("GraniteMoeHybridForCausalLM", GRANITE),
        ("GraniteMoeHybridForCausalLM", {**GRANITE, "layer_types": ["mamba"] * 4}),
    ],
)
def test_none_need_attend(architecture: str, fields: dict[str, Any]) -> None:
    config = of(architecture, **fields, num_attention_heads=None, num_key_value_heads=None)
    assert not config.attends and len(state_specs(config)) == 4 and kv_specs(config, 16, "bfloat16") == {}
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.ropes) == (0, 0, 0, ())


NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 3, "rms_norm_eps": 0.5}


@pytest.mark.parametrize(
    "listed",
    [
        {"hybrid_override_pattern": "M-*M"},
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba"], "num_hidden_layers": None},
        {"layer_types": [LINEAR, "mlp", FULL, LINEAR]},
    ],
)
def test_each_layer_of_nemotron_h_is_one_part(listed: dict[str, Any]) -> None:
    config = of("NemotronHForCausalLM", **NEMOTRON, **listed)
    found = [(layer.has_state, layer.attends, layer.feed_forward) for layer in config.layers]
    mamba = (True, False, "none")
    assert found == [mamba, (False, False, "mlp"), (False, True, "none"), mamba]
    sizes = {"heads": 8, "head_dim": 16, "groups": 2, "state_size": 16, "kernel": 3}
    assert config.mamba2 == Mamba2Config(**sizes, norm_eps=1e-5), "its epsilon has another name"
    assert (config.hidden_act, config.traits.mlp_gate, config.ropes) == ("relu2", False, ())
    assert sorted(state_specs(config)) == [0, 3] and sorted(kv_specs(config, 16, "bfloat16")) == [2]


def test_experts_of_nemotron_h_have_no_gate() -> None:
    sizes = {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 48, "num_experts_per_tok": 3}
    moe = of("NemotronHForCausalLM", **NEMOTRON, **sizes, hybrid_override_pattern="ME*E", n_routed_experts=8).moe
    assert moe is not None and (moe.layers, moe.intermediate_size, moe.shared_size, moe.gated) == ((1, 3), 24, 48, False)
    assert (moe.routing.score, moe.routing.bias, moe.routing.renormalize) == ("sigmoid", True, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_override_pattern": "M-*"}, ["num_hidden_layers", "must be 3", "hybrid_override_pattern"]),
        ({"hybrid_override_pattern": "M-*E"}, ["n_routed_experts is missing"]),
        ({"hybrid_override_pattern": "M-*E", "moe_latent_size": 8}, ["moe_latent_size"]),
        ({"hybrid_override_pattern": "M-*E", "mlp_hidden_act": "silu"}, ["mlp_hidden_act", "relu2"]),
        ({"hybrid_override_pattern": "M-*X"}, ["hybrid_override_pattern", "'X'"]),
        ({}, ["layer_types is missing"]),
        ({"hybrid_override_pattern": "M-*M", "sliding_window": 8}, ["sliding_window"]),
        ({"hybrid_override_pattern": "M-*M", "attention_bias": True}, ["attention_bias: true"]),
        ({"hybrid_override_pattern": "M-*M", "mamba_hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
    ],
)
def test_what_nemotron_h_may_not_have_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        of("NemotronHForCausalLM", **{**NEMOTRON, **changes})
    assert all(word in str(caught.value) for word in words), caught.value


def test_layers_of_falcon_h1_attend_and_have_a_state() -> None:
    config = of("FalconH1ForCausalLM", mamba_d_ssm=96, mamba_n_heads=6, key_multiplier=0.5, lm_head_multiplier=0.25)
    assert all(layer.attends and layer.has_state for layer in config.layers)
    assert sorted(state_specs(config)) == sorted(kv_specs(config, 16, "bfloat16")) == [0, 1, 2, 3]
    assert config.mamba2 is not None and (config.mamba2.width, config.mamba2.norm) == (96, "none")
    assert config.traits.attention_scale == 0.5 * config.head_dim**-0.5 and config.traits.logit_divisor == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ssm_multipliers": [1.0] * 4}, ["ssm_multipliers", "5 numbers"]),
        ({"mlp_multipliers": [1.0, "2"]}, ["mlp_multipliers", "numbers above 0"]),
        ({"lm_head_multiplier": 0}, ["lm_head_multiplier", "above 0"]),
        ({"mamba_d_ssm": 0}, ["mamba_d_ssm", "at least 1"]),
    ],
)
def test_what_falcon_h1_may_not_have_is_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        of("FalconH1ForCausalLM", **{"mamba_n_heads": 8, **changes})
    assert all(word in str(caught.value) for word in words), caught.value
