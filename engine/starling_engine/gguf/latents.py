"""Families with latents in GGUF files: DeepSeek V2, V3, R1 and V3.2, Kimi K2, GLM-4.7-Flash and 5, Mistral Small 4, Kimi Linear."""

from collections.abc import Mapping
from typing import Any

from starling_engine.gguf.family import (
    SIGMOID,
    SOFTMAX,
    Config,
    GgufFamily,
    family,
    only_scored_by,
    read_experts,
    temperature_length,
)
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.names import INDEXER, KIMI_DELTA, LATENTS, SHARED
from starling_engine.gguf.rope import DEFAULT_THETA, read_scaling

KIMI_K2, KIMI_K2_BETA = "kimi-k2", 1.0
"""The rule by which Kimi K2's text is split, and its YaRN's `beta_fast`, which files may leave out."""
MISTRAL4_BETA = 0.1
"""Rise of the temperature of Mistral 4's queries, which the converter leaves out."""
LOG_SCALE = 0.1
"""Factor by which the converter multiplies `mscale_all_dim`, for DeepSeek and its kin alone."""


def _latents(data: GgufMetadata) -> Config:
    """Reads the sizes of latents. Files of before 2025-04 have those of a head where newer ones have those of a latent."""
    rotated = data.number("rope.dimension_count")
    return {
        "num_attention_heads": data.number("attention.head_count"),
        "q_lora_rank": data.get("attention.q_lora_rank"),
        "kv_lora_rank": data.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": data.number("attention.key_length_mla", data.get("attention.key_length")) - rotated,
        "v_head_dim": data.number("attention.value_length_mla", data.get("attention.value_length")),
        "attention_bias": "attn_kv_a_mqa.bias" in data.modules,
    }


def _experts(data: GgufMetadata) -> Config:
    plain = data.get("leading_dense_block_count", 0)
    has_some = data.get("expert_count", 0) and not (isinstance(plain, int) and plain >= data.num_layers)
    return {
        **(read_experts(data) if has_some else {}),
        "n_shared_experts": data.get("expert_shared_count", 0),
        "first_k_dense_replace": plain,
        "num_nextn_predict_layers": 0,
    }


def _deepseek2(data: GgufMetadata) -> Config:
    """Reads the fields of V3, or of V2, whose experts are scored by a softmax. Where a file does not say, biases tell V3."""
    score = data.get("expert_gating_func", SIGMOID if "exp_probs_b.bias" in data.modules else SOFTMAX)
    if data.get("attention.temperature_scale", 0.0):
        raise data.refused("attention.temperature_scale", "is not supported for this architecture; supported: 0")
    if score not in (SOFTMAX, SIGMOID):
        raise data.refused("expert_gating_func", f"{score} is not supported; supported: {SOFTMAX}, {SIGMOID}")
    found = {
        **_latents(data),
        **_experts(data),
        "rope_theta": data.number("rope.freq_base", DEFAULT_THETA),
        "rope_scaling": _scaling(data),
    }
    yarn, fast = found["rope_scaling"], data.get("rope.scaling.yarn_beta_fast")
    if yarn is not None and fast is None and data.file.get("tokenizer.ggml.pre") == KIMI_K2:
        found["rope_scaling"] = {**yarn, "beta_fast": KIMI_K2_BETA}
    if score == SIGMOID:
        return found
    method = "group_limited_greedy" if found.get("n_group", 1) > 1 else "greedy"
    return {**found, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _scaling(data: GgufMetadata) -> dict[str, Any] | None:
    """Reads YaRN. Of its two scales a file has one; in published models they are the same."""
    scaling = read_scaling(data)
    if scaling is None or "mscale_all_dim" not in scaling:
        return scaling
    scale = round(scaling["mscale_all_dim"] / LOG_SCALE, 6)
    return {**scaling, "mscale": scale, "mscale_all_dim": scale}


def _mistral4(data: GgufMetadata) -> Config:
    only_scored_by(data, SOFTMAX)
    scaling = _scaling(data)
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": data.number("rope.freq_base", DEFAULT_THETA)}
    if beta := data.get("attention.temperature_scale", MISTRAL4_BETA if scaling else 0.0):
        rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": temperature_length(data)}
    return {**_latents(data), **_experts(data), "rope_parameters": rope, "rope_scaling": None}


def _indexed(data: GgufMetadata) -> Config:
    """Reads the fields of models whose layers have an indexer."""
    only_scored_by(data, SIGMOID)
    return {
        **_latents(data),
        **_experts(data),
        "rope_theta": data.number("rope.freq_base", DEFAULT_THETA),
        "rope_scaling": _scaling(data),
        "index_n_heads": data.number("attention.indexer.head_count"),
        "index_head_dim": data.number("attention.indexer.key_length"),
        "index_topk": data.number("attention.indexer.top_k"),
    }


def _glm_dsa(data: GgufMetadata) -> Config:
    """Reads the fields of GLM-5. Which layers have an indexer of their own is listed; else those do that hold one."""
    listed = data.get("attention.indexer.types")
    if not isinstance(listed, list):
        listed = [data.has(layer, "indexer.attn_k.weight") for layer in data.layers]
    return {**_indexed(data), "indexer_types": ["full" if each else "shared" for each in listed[: data.num_layers]]}


def _kimi_linear(data: GgufMetadata) -> Config:
    """Reads the fields of Kimi Linear, whose layers attend where they have latents."""
    only_scored_by(data, SIGMOID)
    return {
        **_latents(data),
        **_experts(data),
        "layer_types": data.kinds({"attn_kv_a_mqa.weight": "full_attention"}, "linear_attention"),
        "norm_topk_prob": data.get("expert_weights_norm", True),
        "linear_num_heads": data.number("attention.head_count"),
        "linear_head_dim": data.number("kda.head_dim"),
        "linear_conv_kernel_dim": data.number("ssm.conv_kernel"),
    }


LATENT: Mapping[str, GgufFamily] = {
    "deepseek2": family("DeepseekV3ForCausalLM", _deepseek2, LATENTS, SHARED, attends=False),
    "deepseek32": family("DeepseekV32ForCausalLM", _indexed, LATENTS, INDEXER, SHARED, attends=False),
    "glm-dsa": family("GlmMoeDsaForCausalLM", _glm_dsa, LATENTS, INDEXER, SHARED, attends=False),
    "mistral4": family("Mistral4ForCausalLM", _mistral4, LATENTS, SHARED, attends=False),
    "kimi-linear": family("KimiLinearForCausalLM", _kimi_linear, LATENTS, SHARED, KIMI_DELTA, attends=False),
}
