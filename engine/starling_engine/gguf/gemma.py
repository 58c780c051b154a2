"""Gemma 1 to 4, and EmbeddingGemma, in GGUF files."""

from collections.abc import Mapping

from starling_engine.errors import UnsupportedModel
from starling_engine.gguf.family import Config, GgufFamily, family, nothing, present, read_experts, read_windows
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.names import GEMMA4, NORMS_PLUS_ONE
from starling_engine.gguf.rope import read_scaling

LAYER_TABLE = "per_layer_token_embd.weight"
DENSE = "dense_2.weight"


def _gemma2(data: GgufMetadata, big: int = 46) -> Config:
    """Reads the fields of Gemma 2. Of scores, a file has no scale: those of the model of 27B alone are not scaled by a head."""
    width = data.number("embedding_length") / data.number("attention.head_count")
    return {
        **read_windows(data),
        "query_pre_attn_scalar": width if data.num_layers == big else data.number("attention.key_length", 256),
        "attn_logit_softcapping": data.get("attn_logit_softcapping"),
        "final_logit_softcapping": data.get("final_logit_softcapping"),
    }


def _gemma3(data: GgufMetadata) -> Config:
    local = present(data, rope_local_base_freq="rope.freq_base_swa")
    return {**_gemma2(data, big=62), **local, "rope_theta": data.get("rope.freq_base", 1e6)}


def _gemma_embedding(data: GgufMetadata) -> Config:
    """Reads the fields of EmbeddingGemma, whose tokens see each other in both directions."""
    if DENSE in data.file.tensors:
        rule = "is not supported: dense layers behind the pooling are read from the original checkpoint alone; serve that one"
        raise UnsupportedModel(f"{data.file.path}: {DENSE} {rule}")
    return {**_gemma3(data), "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


def _gemma4(data: GgufMetadata) -> Config:
    """Reads the fields of Gemma 4. Layers that see all tokens have other heads; the last ones may read the cache of others."""
    windows, full = read_windows(data), data.number("attention.key_length")
    sliding = data.number("attention.key_length_swa", full)
    counts, widths = data.get("attention.head_count_kv"), data.get("feed_forward_length")
    kinds = windows.get("layer_types", ["full_attention" for _ in data.layers])
    if data.get("attention.sliding_window", 0) and not isinstance(data.get("attention.sliding_window_pattern"), list):
        raise data.refused("attention.sliding_window_pattern", "must say of each layer if it has a window")
    if isinstance(counts, list) and len(counts) < len(kinds):
        raise data.refused("attention.head_count_kv", f"must have a number for each of {len(kinds)} layers")
    heads = {
        str(layer): {
            "num_key_value_heads": counts[layer] if isinstance(counts, list) else counts,
            "head_dim": sliding if kind == "sliding_attention" else full,
        }
        for layer, kind in enumerate(kinds)
    }
    same = any(data.has(at, "attn_k.weight") and not data.has(at, "attn_v.weight") for at in range(len(kinds)))
    of_full = {"rope_type": "default", **(read_scaling(data) or {}), **present(data, rope_theta="rope.freq_base")}
    of_sliding = {"rope_type": "default", **present(data, rope_theta="rope.freq_base_swa")}
    return {
        **windows,
        **_layer_inputs(data),
        **_experts(data),
        "layer_types": kinds,
        "head_dim": sliding,
        "per_layer_config": heads,
        "attention_k_eq_v": same,
        "num_kv_shared_layers": data.get("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": isinstance(widths, list) and len(set(widths)) > 1,
        "rope_parameters": {"full_attention": of_full, "sliding_attention": of_sliding},
        "rope_scaling": None,
        "final_logit_softcapping": data.get("final_logit_softcapping", 0.0),
    }


def _layer_inputs(data: GgufMetadata) -> Config:
    table = data.file.tensors.get(LAYER_TABLE)
    size = data.get("embedding_length_per_layer_input", 0) if table else 0
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0] if table else None}


def _experts(data: GgufMetadata) -> Config:
    if not data.get("expert_count", 0):
        return {"enable_moe_block": False}
    return {**read_experts(data), "enable_moe_block": True, "top_k_experts": data.number("expert_used_count")}


GEMMAS: Mapping[str, GgufFamily] = {
    "gemma": family("GemmaForCausalLM", nothing, NORMS_PLUS_ONE),
    "gemma2": family("Gemma2ForCausalLM", _gemma2, NORMS_PLUS_ONE),
    "gemma3": family("Gemma3ForCausalLM", _gemma3, NORMS_PLUS_ONE),
    "gemma4": family("Gemma4ForCausalLM", _gemma4, GEMMA4, by_layer=("attention.head_count_kv", "feed_forward_length")),
    "gemma-embedding": family("Gemma3TextModel", _gemma_embedding, NORMS_PLUS_ONE),
}
