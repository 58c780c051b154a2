"""Descriptions of layers: what each family's config says of them, and its defaults."""

from typing import Any

import pytest
from starling_engine.kv_offload.secondary.tiers import cached_as
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.rope import LinearScaling, RopeConfig

from tests.engine.model_config.test_config import LONGROPE, PHI3, of, parse
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
    assert old.ropes == (RopeConfig(theta=1e5, scaling=LinearScaling(factor=8.0)), RopeConfig(theta=5e3))
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
