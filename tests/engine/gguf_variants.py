"""Checkpoints of families as llama.cpp's converter takes them, and with nothing that a GGUF file cannot say."""

from dataclasses import replace
from typing import Any

from tests.engine.checkpoints import (
    CONV,
    DEEPSEEK_ROPE,
    FAMILIES,
    FULL,
    LINEAR,
    LLAMA3_ROPE,
    MINISTRAL_ROPE,
    NTK,
    SLIDING,
    VARIANTS,
    Variant,
)
from tests.engine.encoder_checkpoints import ENCODERS


def _with(name: str, edits: dict[str, Any] | None = None, **changes: Any) -> Variant:
    """Returns the variant with other fields, and edits of its config.json beside its own."""
    found = {**VARIANTS, **FAMILIES}[name]
    return replace(found, changes={**found.changes, **changes}, edits={**found.edits, **(edits or {})})


_KIN = ("bert", "roberta", "xlm-roberta", "distilbert", "nomic-bert", "jina-v3", "modernbert", "eurobert")
GGUF_ENCODERS = {
    **{name: ENCODERS[name] for name in _KIN},
    "gemma-embedding": replace(
        ENCODERS["gemma3"],
        changes={
            **ENCODERS["gemma3"].changes,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
        },
    ),
}
LLAMA4_SIZES: dict[str, Any] = {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "floor_scale": 8192, "attn_scale": 0.1}
OTHER_NAMES = {"qwen2-vl": "qwen2vl", "qwen3-vl": "qwen3vl", "qwen3-vl-moe": "qwen3vlmoe"}
"""Architectures of text parts that are another one's but for their name."""
GGUF_VARIANTS = {
    **{name: FAMILIES[name] for name in ("gemma", "smollm3", "granite", "granite-moe", "granite-moe-shared", "olmo2", "olmo3")},
    **{name: FAMILIES[name] for name in ("phi3", "phi3-long", "glm4", "glm4-moe", "exaone4")},
    **{name: FAMILIES[name] for name in ("qwen2-moe", "cohere", "mamba", "mamba-biases", "mamba2", "lfm2")},
    **{name: FAMILIES[name] for name in ("gemma4", "gemma4-moe", "gemma4-inputs")},
    **{name: FAMILIES[name] for name in ("jamba", "minimax-m2", "nemotron-biases", "stablelm", "stablelm-parallel")},
    **{name: VARIANTS[name] for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-one-group")},
    "deepseek-v2-lite-dense": _with("deepseek-v2-lite-dense", {"unsplit": True}),
    "deepseek-v2-lite-unsplit": _with("deepseek-v2-lite", {"unsplit": True}),
    "deepseek-v3-yarn": _with("deepseek-v3", rope_parameters={**DEEPSEEK_ROPE, "rope_type": "yarn", "rope_theta": 1e4}),
    "glm4-moe-lite": FAMILIES["glm4-moe-lite"],
    "glm4-moe-lite-published": _with("glm4-moe-lite-published", {"num_nextn_predict_layers": None}),
    "kimi-linear": _with("kimi-linear", mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "kimi-linear-plain": _with("kimi-linear", mlp_layer_types=["sparse"] * 4, q_lora_rank=None),
    "llama4": _with("llama4", **LLAMA4_SIZES),
    "llama4-plain": _with("llama4-plain", **LLAMA4_SIZES),
    "llama4-plain-full": _with("llama4-plain", **LLAMA4_SIZES, layer_types=[FULL] * 4, no_rope_layers=[1] * 4),
    "llama4-every-second": _with(
        "llama4-every-second",
        **LLAMA4_SIZES,
        num_local_experts=128,
        no_rope_layers=[1, 1, 1, 0],
        rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    ),
    "deepseek-v3.2": FAMILIES["deepseek-v3.2"],
    "deepseek-v3.2-published": _with("deepseek-v3.2-published", {"num_nextn_predict_layers": None}),
    "glm-5": FAMILIES["glm-5"],
    "glm-5.2": _with("glm-5.2", mlp_layer_types=["dense", *["sparse"] * 4]),
    "bamba": _with("bamba", mlp_bias=False),
    "ministral3": FAMILIES["ministral3"],
    "mistral4": _with("mistral4", rope_parameters={**MINISTRAL_ROPE, "llama_4_scaling_beta": 0.1}),
    "apertus": _with(
        "apertus", rope_parameters={**LLAMA3_ROPE, "rope_theta": 12e6, "original_max_position_embeddings": 8192}, hidden_size=256
    ),
    "qwen2-vl": VARIANTS["qwen2"],
    "qwen3-vl": VARIANTS["qwen3"],
    "qwen3-vl-moe": VARIANTS["qwen3-moe"],
    "gpt-neox": FAMILIES["gpt-neox"],
    "gpt-neox-sequential": _with(
        "gpt-neox-sequential",
        {"rotary_emb_base": 10000},
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "phi": _with("phi", intermediate_size=256),
    "seed-oss": _with("seed-oss", attention_out_bias=False),
    "ernie-moe": _with("ernie-moe", moe_intermediate_size=32),
    "ernie": _with("ernie", use_bias=False),
    "arcee": _with("arcee", attention_bias=False, mlp_bias=False),
    "nemotron-h": _with("nemotron-h", {"num_experts_per_tok": None}),
    "nemotron-h-experts": _with(
        "nemotron-h-experts", n_group=1, topk_group=1, layers_block_type=[LINEAR, "moe", FULL, "moe", LINEAR]
    ),
    "gemma2": _with("gemma2", query_pre_attn_scalar=32),
    "gemma3": _with("gemma3", query_pre_attn_scalar=32, num_hidden_layers=7, layer_types=[SLIDING] * 5 + [FULL, SLIDING]),
    "gpt-oss": _with("gpt-oss", swiglu_limit=7.0),
    "granite-hybrid": _with(
        "granite-hybrid", {"layer_types": ["mamba", "attention", "mamba"], "num_experts_per_tok": None}, intermediate_size=96
    ),
    "granite-hybrid-experts": _with("granite-hybrid-experts", position_embedding_type="nope", mamba_proj_bias=False),
    "lfm2-moe": _with("lfm2-moe", tie_word_embeddings=True, layer_types=[CONV, FULL] * 2),
    "exaone4-full": _with("exaone4-full", {"sliding_window_pattern": None}),
    "starcoder2": _with("starcoder2", sliding_window=4096),
    "cohere2": _with("cohere2", {"rotary_pct": 1.0}),
    "qwen3-next": _with("qwen3-next", linear_value_head_dim=16),
    "qwen3.5": _with("qwen3.5", linear_value_head_dim=16),
    "qwen3.5-moe": _with("qwen3.5-moe", linear_value_head_dim=16),
    "falcon-h1": _with("falcon-h1", {"head_dim": 16}),
    "falcon-h1-normed": _with(
        "falcon-h1-normed", {"head_dim": 16}, projectors_bias=False, attention_bias=False, mlp_bias=False, tie_word_embeddings=False
    ),
    "hunyuan": _with("hunyuan", max_position_embeddings=32768),
    "hunyuan-moe": _with(
        "hunyuan-moe", max_position_embeddings=32768, hidden_size=256, head_dim=128, num_attention_heads=2, rope_parameters=NTK
    ),
}
