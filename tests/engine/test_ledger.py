"""The memory plan."""

from dataclasses import replace
from typing import Any

import pytest
from starling_engine.errors import ConfigError
from starling_engine.kv.spec import KVGroup, KVSpec, WindowSpec, group_layers, peak_blocks, slab_bytes
from starling_engine.ledger import LOGPROB_ROWS, HostMemory, MemoryRequest, activation_bytes, plan_memory
from starling_engine.model_config.config import parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.pooler import PoolerConfig
from starling_engine.model_config.retrieval_heads import RetrievalHeads
from starling_engine.model_config.splade import SpladeConfig

PLAN: dict[str, Any] = {
    "total": 1000,
    "available": 900,
    "fraction": 0.5,
    "weights": 100,
    "activations": 50,
    "kv_bytes": None,
    "slab_bytes": 10,
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


def test_a_model_that_caches_nothing_has_no_cache_in_its_plan() -> None:
    encoder = {**PLAN, "slab_bytes": 0, "useful_blocks": 1, "needed_blocks": 1}
    assert "KV" not in str(plan_memory(MemoryRequest(**encoder)))
    with pytest.raises(ConfigError, match=r"at least 0\.15, or lower max_model_len and max_num_batched_tokens") as refusal:
        plan_memory(MemoryRequest(**{**encoder, "fraction": 0.1}))
    assert "KV" not in str(refusal.value)


def test_a_state_alone_has_room_for_so_many_sequences() -> None:
    """Of 35 blocks one is the null block, and a state has four."""
    ledger = plan_memory(MemoryRequest(**{**PLAN, "needed_blocks": 5, "state_blocks": 4}))
    assert ledger.num_blocks == 35 and ledger.room == "room for 8 states of 4 blocks"
    assert "states " in str(ledger) and "KV" not in str(ledger)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_bytes": 25}, "kv_cache_memory_bytes: .*the state of one request, .* at least 50$"),
        ({"fraction": 0.16}, "leaves too little for a state besides .* or lower max_num_batched_tokens or max_num_seqs$"),
    ],
)
def test_shorter_sequences_make_no_room_for_a_state(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_memory(MemoryRequest(**{**PLAN, "needed_blocks": 5, "state_blocks": 4, **changes}))


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


@pytest.mark.parametrize(
    ("pooler", "rows"),
    [
        (PoolerConfig(), 0),
        (PoolerConfig(splade=SpladeConfig()), 32 + 2 * LOGPROB_ROWS),
        (PoolerConfig(retrieval=RetrievalHeads()), 32 + 2 * LOGPROB_ROWS),
        (PoolerConfig(retrieval=RetrievalHeads(readable=False)), 0),
    ],
)
def test_sparse_vectors_of_an_encoder_count(pooler: PoolerConfig, rows: int) -> None:
    """Each prompt has a number for every token of the vocabulary; logits of some of its tokens come and go."""
    fields = Fields({**SMALL, "architectures": ["BertModel"], "vocab_size": 250_000}, "config.json")
    model = parse_model_config(fields, Fields({}, ""))
    found, plain = (activation_bytes(replace(model, pooler=each), 2, 1000, 32, 1) for each in (pooler, PoolerConfig()))
    assert found - plain == rows * 250_000 * 4


def test_what_weighs_residual_streams_counts() -> None:
    """Checks the lower bound: the streams before and behind a layer, and normed in fp32 with their squares."""
    fields = {**SMALL, "architectures": ["DeepseekV4ForCausalLM"], "num_key_value_heads": 1, "o_groups": 1, "head_dim": 32}
    fields |= {"n_routed_experts": 4, "num_hash_layers": 0}
    fields |= {"qk_rope_head_dim": 8, "index_head_dim": 16, "index_n_heads": 1, "q_lora_rank": 8, "o_lora_rank": 8}
    narrow, wide = (activations(**{**fields, "hidden_size": size}) for size in (8, 512))
    assert wide - narrow >= 1000 * 4 * (512 - 8) * (2 * 2 + 3 * 4)


def test_what_latent_attention_makes_of_a_long_context_counts() -> None:
    """Checks the lower bound: the latents of one sequence, and keys and values of one head."""
    latent = {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": None, "first_k_dense_replace": 4}
    config = parse_model_config(Fields({**SMALL, **latent}, "config.json"), Fields({}, ""))
    short, long = (activation_bytes(config, 2, 1000, 1, length) for length in (1, 100_000))
    assert config.mla is not None
    rotations, scratch = 100_000 * 64 * 4, config.mla.scratch_elements(1000, 1) * 2
    assert long - short >= 100_000 * (512 + 64 + 128 + 64 + 128) * 2 + rotations - scratch


DELTA: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 32,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


def test_what_a_gated_delta_net_computes_counts() -> None:
    """Checks the lower bound: what goes into the convolution and comes out, the gate of the output, and the output twice."""
    plain = activations(**DELTA, layer_types=["full_attention"] * 4, intermediate_size=1)
    channels, values = 2 * 8 * 64 + 16 * 64, 16 * 64
    least, most = (share * 1000 * (2 * channels + 3 * values) * 2 for share in (0.9, 1.1))
    assert least <= activations(**DELTA, intermediate_size=1) - plain <= most


def test_what_kimi_delta_attention_computes_counts() -> None:
    """Checks the lower bound: the same, and decays of each channel, and what they and the gates are made of."""
    fields = {**SMALL, "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 4, "intermediate_size": 1}
    fields |= {"linear_num_heads": 16, "linear_head_dim": 64, "kv_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2}
    plain, mixed = (
        activations(**fields, layer_types=kinds)
        for kinds in (["full_attention"] * 4, ["full_attention"] + ["linear_attention"] * 3)
    )
    width = 16 * 64
    least, most = (share * 1000 * (2 * 3 * width + 3 * width + width + 2 * 64) * 2 for share in (0.9, 1.1))
    assert least <= mixed - plain <= most


def test_what_a_gated_short_convolution_computes_counts() -> None:
    """Checks the lower bound: the input with two gates, what goes into the convolution, what comes out, and that gated."""
    fields = {"architectures": ["Lfm2ForCausalLM"], "head_dim": 2, "block_multiple_of": 1, "intermediate_size": 3}
    plain, mixed = (activations(**fields, full_attn_idxs=layers) for layers in ([0, 1, 2, 3], [1]))
    least, most = (share * 1000 * 6 * 64 * 2 for share in (0.9, 1.1))
    assert least <= mixed - plain <= most


MAMBA2: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "mamba_n_heads": 32,
    "mamba_expand": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 128,
    "num_local_experts": 0,
    "shared_intermediate_size": 1,
}


def test_what_mamba2_computes_counts() -> None:
    """Checks the lower bound: what goes into the convolution and comes out, the gate of the output, and the output twice."""
    plain = activations(**MAMBA2, layer_types=["attention"] * 4)
    width = 16 * SMALL["hidden_size"]
    least, most = (share * 1000 * (2 * (width + 2 * 4 * 128) + 3 * width) * 2 for share in (0.9, 1.1))
    assert least <= activations(**MAMBA2, layer_types=["mamba", "attention"] * 2) - plain <= most


def test_a_gate_of_mamba2_without_a_norm_counts() -> None:
    """The gate is multiplied in fp32, by torch."""
    fields = {"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 32, "mamba_d_ssm": 1024, "intermediate_size": 1}
    normed, plain = (activations(**fields, mamba_rms_norm=norm) for norm in (True, False))
    assert plain - normed == 1000 * 1024 * 4


def test_gates_of_attention_count() -> None:
    """They make its first matrix wider, which is then copied without them."""
    heads = {**DELTA, "layer_types": ["full_attention"] * 4, "num_attention_heads": 32, "num_key_value_heads": 1, "hidden_size": 8}
    gated, plain = (activations(**heads, attn_output_gate=gate) for gate in (True, False))
    assert gated - plain >= 1000 * 2 * 32 * 32 * 2


def test_biases_by_distance_count() -> None:
    """Checks the lower bound: one of each head for each pair of tokens."""
    fields = {**SMALL, "architectures": ["MPNetModel"], "hidden_act": "gelu", "max_position_embeddings": 514}
    config = parse_model_config(Fields(fields, "config.json"), Fields({}, ""))
    short, long = (activation_bytes(config, 2, 512, 1, length) for length in (1, 512))
    assert long - short >= config.num_heads * (512 * 512 - 1) * 2


FULL, WINDOW = KVSpec(8, 1, 8, 4), WindowSpec(8, 1, 8, 4, 16)


def test_layers_of_one_kind_share_a_table_and_all_groups_the_slabs() -> None:
    groups = group_layers(dict(enumerate([FULL, WINDOW, WINDOW, FULL, WINDOW])))
    assert groups == [KVGroup(FULL, (0, 3)), KVGroup(WINDOW, (1, 2)), KVGroup(WINDOW, (4,))]
    assert slab_bytes(groups) == 2 * FULL.layer_block_bytes == 1024
    assert group_layers({}) == [] and slab_bytes([]) == 0


WIDE, SMALL_ROWS, ODD = KVSpec(8, 5, 8, 4), KVSpec(8, 1, 3, 4), KVSpec(8, 1, 3, 1)


@pytest.mark.parametrize(
    ("specs", "groups", "slab"),
    [
        ([WIDE, *[FULL] * 7], [(0,), (1, 2, 3, 4, 5), (6, 7)], 2560),  # one large layer
        ([FULL, *[WIDE] * 3], [(0,), (1,), (2,), (3,)], 2560),
        (
            [*[FULL] * 3, *[SMALL_ROWS] * 10],
            [(0, 1, 2), (3, 4, 5, 6, 7, 8, 9, 10), (11, 12)],
            1536,
        ),  # all of one kind
        ([*[SMALL_ROWS] * 4, *[FULL] * 4], [(0, 1, 2, 3), (4,), (5,), (6,), (7,)], 768),
        ([ODD, ODD, ODD], [(0, 1, 2)], 192),
        ([ODD], [(0,)], 64),
    ],
)
def test_layers_of_other_sizes_fill_the_same_slabs(specs: list[KVSpec], groups: list[tuple[int, ...]], slab: int) -> None:
    found = group_layers(dict(enumerate(specs)))
    assert [group.layers for group in found] == groups and all(specs[i] == group.spec for group in found for i in group.layers)
    assert slab_bytes(found) == slab


def test_a_window_bounds_what_a_sequence_holds() -> None:
    assert peak_blocks([KVGroup(FULL, (0,))], 100, 32) == 13
    assert peak_blocks([KVGroup(WINDOW, (0,))], 1000, 32) == 7
    assert peak_blocks([KVGroup(FULL, (0,)), KVGroup(WINDOW, (1,))], 16, 32) == 4
