"""Reading configs of models with an indexer, against the config classes of transformers; and what of them is refused."""

from dataclasses import replace
from typing import Any

import pytest
from starling_engine.errors import ConfigError, ModelError
from starling_engine.kv.layer_specs import kv_specs, whole_groups
from starling_engine.kv.spec import LatentSpec
from starling_engine.model_config.config import ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.mla_shape import IndexShape, MlaShape
from starling_engine.model_config.split import check_split
from starling_engine.topology.layout import ParallelLayout
from starling_engine.topology.shard import Shard
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from tests.engine.workers import plain_worker

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
V32: dict[str, Any] = {"architectures": ["DeepseekV32ForCausalLM"], "rope_parameters": ROPE, "dtype": "bfloat16"}
GLM: dict[str, Any] = {"architectures": ["GlmMoeDsaForCausalLM"], "rope_parameters": ROPE, "dtype": "bfloat16"}
SHARED = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
"""GLM-5.2's: 21 layers of 78 choose."""


def read(fields: dict[str, Any], **changes: Any) -> ModelConfig:
    """Reads the config that transformers writes for these fields, with some of its text changed."""
    make = DeepseekV32Config if fields["architectures"] == V32["architectures"] else GlmMoeDsaConfig
    written = make(**fields).to_dict()
    written |= {name: value for name, value in fields.items() if name in SHARED or name == "index_topk_pattern"}
    if any(name in changes for name in (*SHARED, "index_topk_pattern")):
        written["indexer_types"] = None
    return parse_model_config(Fields({**written, **changes}, "config.json"), Fields({}, ""))


def test_sizes_are_those_of_transformers_classes() -> None:
    """Their defaults are DeepSeek-V3.2's and GLM-5's."""
    model, glm = read(V32), read(GLM)
    index = IndexShape(num_heads=64, dim=128, top=2048, interleaved=False)
    sizes = {"kv_rank": 512, "rope_dim": 64, "interleaved": True}
    assert model.mla == MlaShape(num_heads=128, q_rank=1536, nope_dim=128, value_dim=128, index=index, **sizes)
    other = IndexShape(num_heads=32, dim=128, top=2048, interleaved=True)
    assert glm.mla == MlaShape(num_heads=64, q_rank=2048, nope_dim=192, value_dim=256, index=other, **sizes)
    assert model.moe is not None and glm.moe is not None
    assert (model.moe.layers, glm.moe.layers) == (tuple(range(3, 61)), tuple(range(3, 78)))
    assert (model.moe.routing.num_groups, glm.moe.routing.num_groups) == (8, 1)
    assert (model.rms_eps, glm.rms_eps) == (1e-6, 1e-5)


@pytest.mark.parametrize("fields", [V32, GLM], ids=["deepseek", "glm"])
def test_defaults_are_the_same_without_the_fields(fields: dict[str, Any]) -> None:
    """Published configs name all sizes; one that does not is read as transformers reads it."""
    written = read(fields)
    names = (
        "index_topk",
        "index_head_dim",
        "index_n_heads",
        "q_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "first_k_dense_replace",
    )
    assert (
        read(fields, **dict.fromkeys((*names, "layer_types", "mlp_layer_types", "indexer_types", "n_group", "topk_group")))
        == written
    )


def test_an_index_key_lies_in_the_row_of_its_latent() -> None:
    """One kind of row for all layers makes one group, whatever shares a choice."""
    assert kv_specs(read(V32), 16, "bfloat16")[60] == LatentSpec(16, 1, 512 + 64 + 128, 2)
    model, config = read(GLM, **SHARED), plain_worker(block_size=16, dtype="bfloat16")
    (group,) = whole_groups(model, config)
    assert group.layers == tuple(range(78)) and group.spec.layer_block_shape == (16, 704)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        SHARED,
        {"index_topk_freq": 3},
        {"index_topk_freq": 0},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FFSSF" + "S" * 73},
        {"index_topk_pattern": ["full"] * 4 + ["shared"] * 74},
    ],
    ids=str,
)
def test_layers_that_share_a_choice_are_those_of_transformers(fields: dict[str, Any]) -> None:
    expected = GlmMoeDsaConfig(**GLM, **fields).indexer_types
    layers = read(GLM, **fields).layers
    assert ["shared" if layer.shares_choice else "full" for layer in layers] == expected
    assert read(GLM, indexer_types=[*expected, "shared"]).layers == layers, "the layer for drafts is listed, too"


def test_stages_begin_with_a_layer_that_chooses() -> None:
    model = read(GLM, **SHARED)
    for count in (1, 2, 3, 8, 20):
        stages = [model.stage_layers(Shard(at, count)) for at in range(count)]
        assert [layer for stage in stages for layer in stage] == list(range(78)) and all(stages)
        assert not any(model.layers[stage[0]].shares_choice for stage in stages)
    assert [model.stage_layers(Shard(at, 2)) for at in range(2)] == [range(38), range(38, 78)], "39 shares what 38 chooses"
    check_split(model, ParallelLayout(pipeline=8))
    with pytest.raises(ConfigError, match=r"24 stages leave one without a layer.*possible: 1, 2, .*20") as caught:
        check_split(model, ParallelLayout(pipeline=24))
    assert caught.value.field == "pipeline_parallel_size"


def test_short_contexts_are_attended_whole() -> None:
    mla = read(V32).mla
    assert mla is not None and not mla.is_chosen(2048) and mla.is_chosen(2049) and mla.attended(9000) == 2048
    without = replace(mla, index=None)
    assert [mla.most_absorbed(n) for n in (1, 700, 2048)] == [without.most_absorbed(n) for n in (1, 700, 2048)]
    assert mla.most_absorbed(100_000) == 100_000, "only chosen latents are multiplied"
    assert mla.most_absorbed(4096) < 4096, "that costs more than all keys do, made once for many queries"


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        (V32, {"index_topk": 0}, ["index_topk", "at least 1", "0"]),
        (V32, {"index_topk": "many"}, ["index_topk", "integer", "many"]),
        (V32, {"index_n_heads": -1}, ["index_n_heads", "at least 1"]),
        (V32, {"index_head_dim": 32}, ["index_head_dim", "qk_rope_head_dim (64)", "32"]),
        (V32, {"q_lora_rank": 0}, ["q_lora_rank", "at least 1"]),
        (V32, {"q_lora_rank": 1 << 31}, ["q_lora_rank", "at most 16384"]),
        (V32, {"rope_interleave": False}, ["rope_interleave: false", "supported: true"]),
        (V32, {"indexer_rope_interleave": "yes"}, ["indexer_rope_interleave", "true or false"]),
        (V32, {"layer_types": ["full_attention"] * 61}, ["layer_types", "full_attention", "indexed_attention"]),
        (V32, {"layer_types": ["indexed_attention"]}, ["layer_types", "num_hidden_layers (61)"]),
        (V32, {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "61"]),
        (V32, {"is_causal": False}, ["both directions", "latents"]),
        (GLM, {"indexer_types": ["full"] * 76}, ["indexer_types", "num_hidden_layers (78)"]),
        (GLM, {"indexer_types": ["full", "half"] * 39}, ["indexer_types", "full or shared"]),
        (GLM, {"indexer_types": ["shared"] * 78}, ["indexer_types", "first layer be full"]),
        (GLM, {"index_topk_pattern": "FX" * 39}, ["index_topk_pattern", "full or shared"]),
        (GLM, {"index_topk_freq": 4, "index_skip_topk_offset": 0}, ["index_skip_topk_offset", "first layer be full"]),
        (GLM, {"index_topk_freq": -1}, ["index_topk_freq", "at least 0"]),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(fields, **changes)
    assert all(word in str(caught.value) for word in words), caught.value
