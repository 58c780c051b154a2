"""Mamba as configs describe it: in Jamba, beside attention, and alone; what is refused."""

from typing import Any

import pytest
from starling_engine.errors import ConfigError, ModelError
from starling_engine.kv.layer_specs import kv_specs, state_specs
from starling_engine.kv.spec import STATE_SLABS, StatePart, StateSpec, slab_bytes
from starling_engine.model_config.config import MAX_LENGTH, STATE_LENGTH, ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.mamba import MambaConfig
from starling_engine.model_config.mamba2 import Mamba2Config
from starling_engine.model_config.moe import MoeConfig, Routing
from starling_engine.model_config.split import check_split
from starling_engine.topology.layout import ParallelLayout
from starling_engine.topology.shard import Shard

JAMBA_MINI: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 65536,
}
FALCON_MAMBA_7B: dict[str, Any] = {
    "architectures": ["FalconMambaForCausalLM"],
    "conv_kernel": 4,
    "expand": 16,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "mixer_rms_eps": 1e-06,
    "num_hidden_layers": 64,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_rank": 256,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 65024,
}
CODESTRAL_MAMBA: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05,
    "n_groups": 8,
    "norm_before_gate": True,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "time_step_rank": 256,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 32768,
}
MAMBA_130M = {
    "architectures": ["MambaForCausalLM"],
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "time_step_rank": "auto",
    "vocab_size": 50280,
}


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(Fields(config | changes, "config.json"), Fields({}, "generation_config.json"))


def test_jamba() -> None:
    model = read(JAMBA_MINI)
    attending = [4, 12, 20, 28]
    assert [at for at, layer in enumerate(model.layers) if layer.attends] == attending == sorted(kv_specs(model, 16, "bfloat16"))
    assert (model.ropes, model.named_ropes, model.max_position, model.usual_length) == ((), {None}, 262144, 262144)
    assert model.mamba == MambaConfig(channels=8192, state_size=16, kernel=4, rank=256, norms="weights")
    half = StateSpec((StatePart(16, (4096,)), StatePart(3, (4096,))))
    assert state_specs(model, Shard(1, 2)) == {at: half for at in range(32) if at not in attending}
    routing = Routing(num_experts=16, top_k=2)
    assert model.moe == MoeConfig(layers=tuple(range(1, 32, 2)), intermediate_size=14336, routing=routing)
    assert read(JAMBA_MINI, num_experts=1).moe is None
    assert read(JAMBA_MINI, num_experts=None).moe == model.moe == read(JAMBA_MINI, num_experts=None, num_local_experts=16).moe


@pytest.mark.parametrize(
    ("config", "changes", "found"),
    [
        (FALCON_MAMBA_7B, {}, MambaConfig(channels=8192, state_size=16, kernel=4, rank=256, norms="without weights")),
        (MAMBA_130M, {}, MambaConfig(channels=1536, state_size=16, kernel=4, rank=48)),
        (MAMBA_130M, {"expand": 3, "use_bias": True}, MambaConfig(channels=2304, state_size=16, kernel=4, rank=48, bias=True)),
    ],
)
def test_a_state_alone(config: dict[str, Any], changes: dict[str, Any], found: MambaConfig) -> None:
    model = read(config, **changes)
    assert model.mamba == found and not model.attends and model.has_state
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size) == (0, 0, 0, 0)
    assert len(state_specs(model)) == model.num_layers and kv_specs(model, 16, "bfloat16") == {}
    assert (model.rms_eps, model.max_position, model.usual_length) == (1e-5, MAX_LENGTH, STATE_LENGTH)
    assert model.tie_word_embeddings == (config is MAMBA_130M)
    assert read(config, max_position_embeddings=8192).usual_length == 8192


def test_codestral_mamba() -> None:
    model = read(CODESTRAL_MAMBA)
    assert model.mamba is None and not model.attends
    assert model.mamba2 == Mamba2Config(heads=128, head_dim=64, groups=8, state_size=128, kernel=4, norm_eps=1e-5)


@pytest.mark.parametrize("config", [FALCON_MAMBA_7B, CODESTRAL_MAMBA], ids=["falcon", "codestral"])
def test_a_state_alone_is_cut_into_few_slabs(config: dict[str, Any]) -> None:
    """Each part leaves a part of one slab unused at most."""
    model = read(config)
    (spec,) = set(state_specs(model).values())
    slab = slab_bytes([], spec, model.num_layers)
    blocks = spec.columns(model.num_layers, slab)[-1]
    assert STATE_SLABS <= blocks <= STATE_SLABS + 1 and blocks * slab < 1.06 * model.num_layers * spec.layer_bytes


def test_ranks_divide_the_channels() -> None:
    with pytest.raises(ConfigError, match=r"must divide the channels of its Mamba \(1536\); possible: 1, 2, 3, 4, 6, 8, "):
        check_split(read(MAMBA_130M), ParallelLayout(tensor=5))
    check_split(read(MAMBA_130M), ParallelLayout(tensor=3))
    with pytest.raises(ConfigError, match=r"the heads of its Mamba-2 \(128\); so must the groups of its Mamba-2 \(8\)"):
        check_split(read(CODESTRAL_MAMBA), ParallelLayout(tensor=3))


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (JAMBA_MINI, {"mamba_d_state": 0}, ["mamba_d_state", "at least 1"]),
        (JAMBA_MINI, {"mamba_d_state": 10**9}, ["mamba_d_state", "at most 8192"]),
        (JAMBA_MINI, {"mamba_expand": 0}, ["mamba_expand", "at least 1"]),
        (JAMBA_MINI, {"mamba_expand": 10**6}, ["mamba_expand", "at most"]),
        (JAMBA_MINI, {"mamba_dt_rank": 0}, ["mamba_dt_rank", "at least 1"]),
        (JAMBA_MINI, {"mamba_dt_rank": "wide"}, ["mamba_dt_rank", "integer"]),
        (JAMBA_MINI, {"mamba_d_conv": 1}, ["mamba_d_conv", "at least 2"]),
        (JAMBA_MINI, {"mamba_inner_layernorms": False}, ["mamba_inner_layernorms: false"]),
        (JAMBA_MINI, {"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        (JAMBA_MINI, {"attn_layer_offset": 8}, ["attn_layer_offset", "below attn_layer_period (8)"]),
        (JAMBA_MINI, {"expert_layer_period": 0}, ["expert_layer_period", "at least 1"]),
        (JAMBA_MINI, {"num_experts_per_tok": 17}, ["num_experts_per_tok", "at most 16"]),
        (JAMBA_MINI, {"sliding_window": 4096}, ["sliding_window"]),
        (JAMBA_MINI, {"num_attention_heads": 0}, ["num_attention_heads", "at least 1"]),
        (MAMBA_130M, {"state_size": 10**9}, ["state_size", "at most"]),
        (MAMBA_130M, {"conv_kernel": 10**9}, ["conv_kernel", "at most 256"]),
        (MAMBA_130M, {"expand": 1.5}, ["expand", "integer"]),
        (MAMBA_130M, {"intermediate_size": 10**9}, ["intermediate_size", "at most"]),
        (MAMBA_130M, {"rms_norm": False}, ["rms_norm: false"]),
        (MAMBA_130M, {"hidden_size": 0}, ["hidden_size", "at least 1"]),
        (MAMBA_130M, {"is_causal": False}, ["both directions", "recurrent state"]),
        (CODESTRAL_MAMBA, {"num_heads": 0}, ["num_heads", "at least 1"]),
        (CODESTRAL_MAMBA, {"num_heads": 96}, ["num_heads", "must divide 8192"]),
        (CODESTRAL_MAMBA, {"head_dim": 32}, ["head_dim", "must be 64"]),
        (CODESTRAL_MAMBA, {"n_groups": 3}, ["n_groups must divide num_heads (128)"]),
        (CODESTRAL_MAMBA, {"state_size": 10**9}, ["state_size", "at most"]),
        (CODESTRAL_MAMBA, {"time_step_limit": [1.0]}, ["time_step_limit", "two numbers"]),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(config, **changes)
    assert all(word in str(caught.value) for word in ["config.json", *words]), caught.value
