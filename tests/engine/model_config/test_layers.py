"""Descriptions of layers: what each family's config says of them, and its defaults."""

from typing import Any

import pytest
from starling_engine.errors import ModelError
from starling_engine.kv_offload.secondary.tiers import cached_as, chunk_layout
from starling_engine.model_config.config import ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.model_config.rope import LinearScaling, RopeConfig
from starling_engine.topology.layout import ParallelLayout

from tests.engine.model_config.test_config import LONGROPE, PHI3, SMALL, of, parse
from tests.engine.workers import plain_worker


def layers(architecture: str, **changes: Any) -> list[tuple[int, int | None]]:
    """Returns each layer's window and rotary embedding."""
    return [(layer.window, layer.rope) for layer in of(f"{architecture}ForCausalLM", **changes).layers]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("Gemma2", {}, [(4096, 0), (0, 0)] * 2),
        ("Gemma3", {"sliding_window": 8}, [(8, 1)] * 4),
        ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 3}, [(8, 1), (8, 1), (0, 0), (8, 1)]),
        ("SmolLM3", {}, [(0, 0)] * 3 + [(0, None)]),
        ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0], "no_rope_layer_interval": 2}, [(0, None), (0, 0), (0, 0), (0, None)]),
        ("SmolLM3", {"use_sliding_window": True, "sliding_window": 8}, [(0, 0)] * 3 + [(8, None)]),
        ("Olmo3", {}, [(4096, 1)] * 3 + [(0, 0)]),
        ("Exaone4", {"sliding_window": 8, "sliding_window_pattern": "LLG"}, [(8, 0), (8, 0), (0, None), (8, 0)]),
        ("Exaone4", {"sliding_window": None, "sliding_window_pattern": None}, [(0, 0)] * 4),
        ("Cohere2", {"sliding_window": 8}, [(8, 0)] * 3 + [(0, None)]),
        ("Phi3", {"sliding_window": 2047}, [(2047, 0)] * 4),
        ("Phi3", {"sliding_window": 2048}, [(0, 0)] * 4),
    ],
)
def test_windows_and_rotation(architecture: str, changes: dict[str, Any], expected: list[tuple[int, int | None]]) -> None:
    assert layers(architecture, **changes) == expected


def test_caps_are_the_authors_unless_they_are_null() -> None:
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": 20}
    for architecture, changes, expected in (
        ("Gemma2ForCausalLM", {}, (50.0, 30.0)),
        ("Gemma2ForCausalLM", caps, (0.0, 20.0)),
        ("Gemma3ForCausalLM", {}, (0.0, 0.0)),
    ):
        traits = of(architecture, **changes).traits
        assert (traits.attention_cap, traits.logit_cap) == expected


def test_layers_that_slide_have_a_base_of_their_own() -> None:
    old = of("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 8}, rope_theta=1e5, rope_local_base_freq=5e3)
    assert old.ropes == (RopeConfig(theta=1e5, scaling=LinearScaling(factor=8.0, original_max_position=256)), RopeConfig(theta=5e3))
    assert old.max_position == 2048, "the scaled length is written, for layers that slide have it too"
    assert of("Gemma3ForCausalLM").ropes == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
    nested: dict[str, Any] = {"rope_theta": 1e5, "rope_parameters": {"full_attention": {"rope_type": "default"}}}
    for local, theta in ({}, 1e4), ({"rope_local_base_freq": 5e3}, 5e3):
        assert of("Gemma3ForCausalLM", **nested, **local).ropes == (RopeConfig(theta=1e5), RopeConfig(theta=theta))
    assert of("Olmo3ForCausalLM", **nested).ropes == (RopeConfig(theta=1e5),) * 2
    assert of("Olmo3ForCausalLM", rope_theta=7e5).ropes == (RopeConfig(theta=7e5),) * 2


def test_experts_are_part_of_a_layer() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]}
    assert [layer.feed_forward for layer in of("Qwen3MoeForCausalLM", **moe).layers] == ["experts", "mlp", "experts", "experts"]


def test_keys_of_one_set_of_longrope_factors_are_no_good_to_the_other() -> None:
    def kind(model: ModelConfig, length: int) -> str:
        return cached_as(model, plain_worker(dtype="bfloat16", max_model_len=length))

    phi3 = parse(**PHI3, rope_scaling=LONGROPE)
    assert kind(phi3, 64) == kind(phi3, 512) != kind(phi3, 513) == kind(phi3, 2048)
    assert kind(parse(), 64) == kind(parse(), 2048) == "bfloat16"


WORKER: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16}


@pytest.mark.parametrize(
    "changes",
    [{"kv_cache": "fp8"}, {"kv_cache": "int8"}, {"kv_cache": "int4"}, {"quantization": "int8"}, {"dtype": "float16"}],
    ids=str,
)
def test_keys_that_are_rounded_in_another_way_have_other_names(changes: dict[str, Any]) -> None:
    plain, other = (plain_worker(**{**WORKER, **each}) for each in ({}, changes))
    assert cached_as(parse(), plain) != cached_as(parse(), other)


def test_chunks_are_alike_in_all_layouts_of_ranks_and_sizes_of_blocks() -> None:
    model = of("Gemma3ForCausalLM")
    layouts = [ParallelLayout(), ParallelLayout(tensor=2), ParallelLayout(pipeline=2)]
    workers = [plain_worker(**WORKER | {"block_size": size, "layout": layout}) for size in (8, 16, 32) for layout in layouts]
    assert len({chunk_layout(model, worker) for worker in workers}) == 1
    windows = chunk_layout(of("Gemma3ForCausalLM", sliding_window_pattern=2), workers[0])
    assert windows != chunk_layout(model, workers[0]), "groups have other layers"


DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
LINEAR, FULL = "linear_attention", "full_attention"


def mixers(architecture: str, **changes: Any) -> list[bool]:
    """Returns which layers have a state."""
    return [layer.has_state for layer in of(f"{architecture}ForCausalLM", **changes).layers]


def test_layers_that_have_a_state_are_listed_or_all_but_every_fourth() -> None:
    delta = {**DELTA, "linear_conv_kernel_dim": 4}
    assert mixers("Qwen3_5", **delta) == mixers("OlmoHybrid") == [True, True, True, False]
    assert mixers("Qwen3_5", **delta, full_attention_interval=2) == [True, False] * 2
    assert mixers("Qwen3_5", **delta, layer_types=[FULL, LINEAR, LINEAR, FULL]) == [False, True, True, False]
    assert mixers("OlmoHybrid", num_hidden_layers=2) == [True, False], "one at least attends"


def test_sizes_of_states_without_any_are_not_needed() -> None:
    config = of("Qwen3_5ForCausalLM", layer_types=[FULL] * 4)
    assert not config.has_state and config.gated_delta is None and config.traits.attention_gate
    assert not of("Qwen3_5ForCausalLM", layer_types=[FULL] * 4, attn_output_gate=False).traits.attention_gate


def test_qwen3_next_has_experts_unless_it_has_none() -> None:
    sizes = {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "layer_types": [FULL] * 4,
    }
    moe = of("Qwen3NextForCausalLM", num_experts=8, mlp_only_layers=[1], **sizes).moe
    assert moe is not None and moe.layers == (0, 2, 3) and moe.routing.renormalize
    assert of("Qwen3NextForCausalLM", num_experts=0, **sizes).moe is None
    with pytest.raises(ModelError, match="num_experts is missing"):
        of("Qwen3NextForCausalLM", **sizes)
    moe = of("Qwen3_5MoeForCausalLM", num_experts=8, norm_topk_prob=False, decoder_sparse_step=2, **sizes).moe
    assert moe is not None and moe.layers == (0, 1, 2, 3) and moe.routing.renormalize, "as in transformers, no field changes it"


def test_olmo_hybrids_sizes_follow_from_attentions() -> None:
    config = of("OlmoHybridForCausalLM", num_key_value_heads=4)
    assert config.gated_delta == GatedDeltaConfig(
        key_heads=4, value_heads=4, key_dim=12, value_dim=24, kernel=4, rate_scale=2.0, norm_eps=1e-5
    )
    written = of("OlmoHybridForCausalLM", **DELTA, linear_allow_neg_eigval=False).gated_delta
    assert written == GatedDeltaConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=16, kernel=4, norm_eps=1e-5)
    assert [layer.norms for layer in config.layers] == ["before"] * 3 + ["after"]


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 1e4),
        ({"rope_parameters": None}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None}, None),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, None),
    ],
)
def test_olmo_hybrid_rotates_nothing_where_its_base_is_null(changes: dict[str, Any], theta: float | None) -> None:
    """Transformers 5.23 reads these so."""
    config = of("OlmoHybridForCausalLM", **changes)
    assert [rope.theta for rope in config.ropes] == ([] if theta is None else [theta])
    assert config.named_ropes == {None if theta is None else 0}


def test_a_text_models_fields_may_lie_in_those_of_another() -> None:
    fields = {**DELTA, "linear_conv_kernel_dim": 4, "layer_types": [LINEAR, FULL]}
    text = {**SMALL, **fields, "num_hidden_layers": 2, "architectures": None}
    of_text = of("Qwen3_5ForCausalLM", **fields, num_hidden_layers=2)
    nested = Fields({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}, "config.json")
    assert parse_model_config(nested, Fields({}, "")) == of_text
    broken = Fields({**nested.values, "text_config": {**text, "linear_num_key_heads": 0}}, "config.json")
    with pytest.raises(ModelError, match=r"config\.json: text_config: linear_num_key_heads"):
        parse_model_config(broken, Fields({}, ""))
    with pytest.raises(ModelError, match=r"^config\.json: linear_num_key_heads"):
        of("Qwen3_5ForCausalLM", **{**fields, "linear_num_key_heads": 0}, num_hidden_layers=2)
