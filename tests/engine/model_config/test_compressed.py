"""Reading configs of DeepSeek-V4, against the config class of transformers; its cache; and what of it is refused."""

from typing import Any

import pytest
from starling_engine.errors import ConfigError, ModelError
from starling_engine.kv.layer_specs import kv_specs, run_specs, whole_groups
from starling_engine.kv.spec import RunSpec, WindowRowsSpec, slab_bytes
from starling_engine.kv_offload.secondary.tiers import chunk_layout
from starling_engine.model_config.compressed import CompressedShape
from starling_engine.model_config.config import ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import Runs
from starling_engine.model_config.mla_shape import IndexShape
from starling_engine.model_config.moe import ClampedSwiglu
from starling_engine.model_config.rope import YarnScaling
from starling_engine.model_config.split import check_split
from starling_engine.topology.layout import ParallelLayout
from transformers import DeepseekV4Config

from tests.engine.workers import plain_worker

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": "bfloat16",
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "num_hash_layers": 3,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""What tells V4 Flash from the class's defaults. The last rate is of the layer for drafts."""
SPARSE, HEAVY = Runs(4, indexed=True), Runs(128)


def read(**changes: Any) -> ModelConfig:
    """Reads the config that transformers writes, with some of its text changed."""
    written = DeepseekV4Config(**FLASH).to_dict()
    return parse_model_config(Fields({**written, **changes}, "config.json"), Fields({}, ""))


def test_sizes_are_those_of_transformers_classes() -> None:
    model = read()
    index = IndexShape(num_heads=64, dim=128, top=512, interleaved=True)
    assert model.compressed == CompressedShape(
        num_heads=64, head_dim=512, rope_dim=64, q_rank=1024, groups=8, group_rank=1024, index=index
    )
    assert [layer.runs for layer in model.layers[:4]] == [None, None, SPARSE, HEAVY] and model.num_layers == 43
    assert (model.num_kv_heads, set(model.windows), model.max_position) == (1, {128}, 1 << 20)
    assert [layer.rope for layer in model.layers[:4]] == [0, 0, 1, 1]
    main, compress = model.ropes
    assert (main.theta, main.scaling, compress.theta) == (1e4, None, 1.6e5)
    assert isinstance(compress.scaling, YarnScaling) and compress.scaling.attention_factor == 1.0
    assert model.moe is not None and model.moe.by_table == (0, 1, 2) and len(model.moe.layers) == 43
    assert model.moe.gate == ClampedSwiglu(alpha=1.0, limit=10.0, offset=0.0) and model.moe.shared_size == 2048


def test_a_config_as_the_authors_write_it_is_the_same() -> None:
    """Fields that the class replaces are theirs, and some of its defaults are left out."""
    replaced = ("layer_types", "compress_rates", "mlp_layer_types", "partial_rotary_factor", "rope_parameters")
    defaults = ("o_groups", "o_lora_rank", "index_topk", "index_n_heads", "index_head_dim", "q_lora_rank", "hc_mult", "hc_eps")
    plain = {**FLASH, **dict.fromkeys((*replaced, *defaults)), "qk_rope_head_dim": 64, "topk_method": "noaux_tc"}
    assert read(**plain) == read()
    assert read(**{**plain, "compress_ratios": None}).layers[0].runs == HEAVY, "without a list the first two are heavy"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_layers_without_a_list_are_those_of_transformers(count: int) -> None:
    kinds = DeepseekV4Config(num_hidden_layers=count).layer_types
    layers = read(num_hidden_layers=count, layer_types=None, mlp_layer_types=None).layers
    assert ["compressed_sparse_attention" if layer.runs == SPARSE else "heavily_compressed_attention" for layer in layers] == kinds


def test_a_row_has_what_its_runs_entry_is_made_of() -> None:
    """An entry lies in the block of its run's last token; a block that is shorter than a run has room for one."""
    model = read()
    specs, runs = kv_specs(model, 16, "bfloat16"), run_specs(model, 16, "bfloat16")
    assert specs[0] == WindowRowsSpec(16, 1, 512, 2, 128)
    assert specs[2] == WindowRowsSpec(16, 1, 512 + 4 * 512 + 4 * 128, 2, 128)
    assert specs[3] == WindowRowsSpec(16, 1, 3 * 512, 2, 128)
    assert runs[2] == RunSpec(16, 1, 640, 2, 4) and runs[2].layer_block_shape == (4, 640)
    assert runs[3].layer_block_shape == (1, 512) and sorted(runs) == [*range(2, 43)]
    narrow = read(sliding_window=3)
    assert [kv_specs(narrow, 16, "bfloat16")[at].window for at in (0, 2, 3)] == [3, 8, 128], "runs are kept while they last"


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_price_of_a_token_is_what_docs_say(block_size: int) -> None:
    groups = whole_groups(read(), plain_worker(block_size=block_size, dtype="bfloat16"))
    kept = sum(not group.spec.window for group in groups)
    assert kept * slab_bytes(groups) / block_size == 18 << 10
    windows = sum(-(-group.spec.window // block_size) + 1 for group in groups if group.spec.window)
    assert 25 < windows * slab_bytes(groups) / (1 << 20) < 31


def test_engines_whose_blocks_have_other_entries_share_no_chunks() -> None:
    """A run of 128 tokens is as long as several blocks, of which one has the entry: chunks hold more of smaller blocks."""
    layouts = [chunk_layout(read(), plain_worker(block_size=size, dtype="bfloat16")) for size in (8, 16, 32)]
    assert len({*layouts}) == 3


def test_layouts_that_cannot_be_are_named() -> None:
    model = read()
    check_split(model, ParallelLayout(tensor=8, pipeline=4))
    with pytest.raises(ConfigError, match=r"16 ranks .* the groups of its heads \(8\).*possible: 1, 2, 4, 8$"):
        check_split(model, ParallelLayout(tensor=16))
    with pytest.raises(ConfigError, match=r"15 stages leave layers whose experts go by token ids .*possible: 1, .* 14$") as caught:
        check_split(model, ParallelLayout(pipeline=15))
    assert caught.value.field == "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": None, "compress_ratios": [8] * 43}, "compress_ratios: 8 is not supported; supported: 0, 4, 128"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types: 'full_attention' is not supported"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types must have num_hidden_layers \(43\) entries"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types must have num_hidden_layers .* of hash_moe or moe"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be 1"),
        ({"o_groups": 7}, r"o_groups must divide num_attention_heads \(64\)"),
        ({"index_head_dim": 32}, "index_head_dim must be at least 64"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sqrtsoftplus"),
        ({"norm_topk_prob": False}, "norm_topk_prob: false is not supported"),
        ({"mlp_bias": True}, "mlp_bias: true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok must be at most 256"),
        ({"o_lora_rank": 1 << 64}, "o_lora_rank must be at most 16384"),
        ({"hc_mult": 0}, "hc_mult must be an integer of at least 1"),
        ({"compress_rates": {"heavily_compressed_attention": 1 << 20}}, "heavily_compressed_attention must be at most"),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read(**changes)
