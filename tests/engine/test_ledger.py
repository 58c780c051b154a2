"""The memory plan."""

from typing import Any

import pytest
from starling_engine.errors import ConfigError
from starling_engine.kv.spec import KVGroup, KVSpec, WindowSpec, group_layers, peak_blocks
from starling_engine.ledger import HostMemory, MemoryRequest, activation_bytes, plan_memory
from starling_engine.model_config.config import parse_model_config
from starling_engine.model_config.fields import Fields

PLAN: dict[str, Any] = {
    "total": 1000,
    "available": 900,
    "fraction": 0.5,
    "weights": 100,
    "activations": 50,
    "kv_bytes": None,
    "bytes_per_block": 10,
    "block_size": 16,
    "useful_blocks": 1000,
    "needed_blocks": 3,
}

BIG = {**PLAN, "total": 16 << 20, "available": 16 << 20}


@pytest.mark.parametrize(
    ("changes", "blocks", "left"),
    [
        ({}, 35, 0),
        ({"useful_blocks": 7}, 7, 280),
        ({"kv_bytes": 105}, 10, 750),
        ({"available": 200}, 15, 0),
        ({"tables": 120}, 23, 0),
        ({"tables": 120, "unified": False}, 35, 0),
        ({"host": HostMemory(cpu=120)}, 23, 0),
        ({"host": HostMemory(cpu=120), "unified": False}, 35, 0),
        ({"host": HostMemory(cpu=320)}, 3, 0),
        ({"host": HostMemory(staging=60, store=60)}, 23, 0),
        ({"host": HostMemory(cpu=745), "kv_bytes": 105}, 10, 5),
    ],
)
def test_what_fits(changes: dict[str, Any], blocks: int, left: int) -> None:
    ledger = plan_memory(MemoryRequest(**{**PLAN, **changes}))
    assert (ledger.num_blocks, ledger.left) == (blocks, left)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fraction": 0.16}, "at least 0.18"),
        ({"tables": 10, "fraction": 0.16}, "tables .*at least 0.19"),
        ({"kv_bytes": 25}, "at least 30"),
        ({"kv_bytes": 2000}, "at most 850"),
        ({"weights": 990, "fraction": 1.0}, "lower max_model_len"),
        ({"host": HostMemory(cpu=321)}, "kv_cpu_bytes: .*at most 320"),
        ({"host": HostMemory(cpu=746), "kv_bytes": 105}, "kv_cpu_bytes: .*at most 745"),
        ({"host": HostMemory(cpu=10), "fraction": 0.16}, "gpu_memory_utilization: .*at least 0.19"),
        ({"host": HostMemory(cpu=10), "kv_bytes": 2000}, "kv_cache_memory_bytes: .*at most 840"),
    ],
)
def test_what_does_not_fit_names_a_value_that_does(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_memory(MemoryRequest(**{**PLAN, **changes}))


@pytest.mark.parametrize(
    ("unified", "rows"),
    [
        (True, ["weights", "KV cache", "activations", "tables", "staging", "store", "left", "limit"]),
        (False, ["weights", "KV cache", "activations", "left", "limit", "tables", "staging", "store"]),
    ],
)
def test_tiers_are_printed_among_what_the_limit_is_for(unified: bool, rows: list[str]) -> None:
    lines = str(plan_memory(MemoryRequest(**BIG, host=HostMemory(staging=3 << 20, store=2 << 20), unified=unified))).splitlines()
    assert [line[:12].strip() for line in lines] == rows
    assert "staging         3.00 MiB" in lines and "store           2.00 MiB" in lines
    assert "CPU tier        3.00 MiB" in str(plan_memory(MemoryRequest(**BIG, host=HostMemory(cpu=3 << 20), unified=unified)))


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (HostMemory(cpu=300, store=21), "kv_cpu_bytes: .*at most 299"),
        (HostMemory(cpu=100, store=300), "kv_store: .*, 220 bytes together at most"),
        (HostMemory(store=321), "kv_store: .*, 320 bytes together at most"),
        (HostMemory(staging=321), "kv_fs_path: .*set kv_cpu_bytes to at most 320"),
        (HostMemory(staging=300, store=100, staged_for="kv_store"), "kv_store: .*set kv_cpu_bytes to at most 220"),
        (HostMemory(cpu=500, store=400), "kv_cpu_bytes: .*at most 0"),
    ],
)
def test_what_takes_most_of_a_host_that_is_too_small_is_named(host: HostMemory, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_memory(MemoryRequest(**{**PLAN, "host": host}))


SMALL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 1,
    "max_position_embeddings": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def activations(**changes: Any) -> int:
    fields = Fields({**SMALL, **changes}, "config.json")
    return activation_bytes(parse_model_config(fields, Fields({}, "")), 2, 1000, 1, 1)


def test_what_a_step_needs_grows_with_the_experts_of_a_token() -> None:
    wide = {"moe_intermediate_size": 512, "num_experts": 8}
    four, eight = activations(**wide, num_experts_per_tok=4), activations(**wide, num_experts_per_tok=8)
    # Of each expert a row of its intermediate size; and a few indices.
    assert 4 * 1000 * 512 * 2 <= eight - four <= 4.5 * 1000 * 512 * 2


def test_a_plain_layer_among_those_with_experts_counts() -> None:
    some = activations(mlp_only_layers=[1], intermediate_size=4096)
    assert some - activations(intermediate_size=4096) >= 1000 * 3 * 4000 * 2 - activations()


def test_what_latent_attention_makes_of_a_long_context_counts() -> None:
    """Checks the lower bound: the latents of one sequence, and keys and values of one head."""
    latent = {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": None, "first_k_dense_replace": 4}
    config = parse_model_config(Fields({**SMALL, **latent}, "config.json"), Fields({}, ""))
    short, long = (activation_bytes(config, 2, 1000, 1, length) for length in (1, 100_000))
    assert config.mla is not None
    rotations, scratch = 100_000 * 64 * 4, config.mla.scratch_elements(1000, 1) * 2
    assert long - short >= 100_000 * (512 + 64 + 128 + 64 + 128) * 2 + rotations - scratch


FULL, WINDOW = KVSpec(8, 1, 8, 4), WindowSpec(8, 1, 8, 4, 16)


def test_layers_of_one_kind_share_a_table_and_all_groups_a_page_size() -> None:
    groups = group_layers([FULL, WINDOW, WINDOW, FULL, WINDOW])
    assert groups == [KVGroup(FULL, (0, 3)), KVGroup(WINDOW, (1, 2)), KVGroup(WINDOW, (4,))]
    with pytest.raises(ValueError, match="different sizes"):
        group_layers([FULL, KVSpec(8, 2, 8, 4)])


def test_a_window_bounds_what_a_sequence_holds() -> None:
    assert peak_blocks([KVGroup(FULL, (0,))], 100, 32) == 13
    assert peak_blocks([KVGroup(WINDOW, (0,))], 1000, 32) == 7
    assert peak_blocks([KVGroup(FULL, (0,)), KVGroup(WINDOW, (1,))], 16, 32) == 4
