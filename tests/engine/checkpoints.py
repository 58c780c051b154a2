"""Small synthetic checkpoints of real architectures, written by transformers, and what transformers answers for them.

The file is long because it is one table of architectures.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.authors_tensors import Rewrite, chatglm, exaone, internlm2

VOCAB = 512
PROMPT = 40
STEPS = 64
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Variant:
    """`model_type` of transformers, what differs from BASE, and edits of the written config.json (None deletes).

    `rewrite` makes the tensors of a family's authors of those that are written.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    edits: dict[str, Any] = field(default_factory=dict)
    rewrite: Rewrite | None = None


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DENSE: dict[str, Any] = {**MLA, "first_k_dense_replace": 3}
DEEPSEEK_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
FLASH_EXPERTS = {name: value for name, value in DEEPSEEK_EXPERTS.items() if name != "first_k_dense_replace"}
DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 32,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
INDEXER: dict[str, Any] = {**MLA, **DEEPSEEK_EXPERTS, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 8}
"""Most tokens of a prompt have more before them than an indexer chooses."""
V4_ROPE = {"factor": 16, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
COMPRESSED: dict[str, Any] = {
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "num_key_value_heads": 1,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 4,
    "sliding_window": 12,
    "num_hidden_layers": 4,
}
"""Prompts have more runs of tokens than an indexer chooses."""
RUNS, HEAVY_RUNS = "compressed_sparse_attention", "heavily_compressed_attention"
EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SLIDING, FULL = "sliding_attention", "full_attention"
VARIANTS = {
    "llama2": Variant("llama", {"num_key_value_heads": 4}),
    "llama3.1": Variant("llama", {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}}),
    "llama3.1-old-config": Variant(
        "llama",
        {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}},
        {
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3_ROPE,
            "dtype": None,
            "torch_dtype": "float32",
        },
    ),
    "llama-linear": Variant("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-yarn": Variant(
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-wide-heads": Variant("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "mistral-window": Variant("mistral", {"sliding_window": 12}),
    "mistral-full": Variant("mistral", {"sliding_window": None}),
    "ministral-mixed": Variant("ministral", {"head_dim": 16, "sliding_window": 12, "layer_types": [FULL, SLIDING, SLIDING]}),
    "qwen2": Variant("qwen2"),
    "qwen2-mixed": Variant("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": Variant("qwen3", {"head_dim": 32}),
    "qwen3-tied": Variant("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-mixed": Variant(
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "deepseek-v2-dense": Variant(
        "deepseek_v2", {**DENSE, "v_head_dim": 12, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}
    ),
    "deepseek-v2-lite-dense": Variant(
        "deepseek_v2",
        {**DENSE, "q_lora_rank": None, "rope_parameters": {**DEEPSEEK_ROPE, "rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": None, "rope_theta": 10000, "rope_scaling": DEEPSEEK_ROPE, "head_dim": None},
    ),
    "deepseek-v3-dense": Variant(
        "deepseek_v3",
        {
            **DENSE,
            "rope_parameters": {**DEEPSEEK_ROPE, "rope_type": "yarn", "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-v2-lite": Variant(
        "deepseek_v2", {**MLA, **DEEPSEEK_EXPERTS, "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
    ),
    "deepseek-v2": Variant(
        "deepseek_v2",
        {
            **MLA,
            **DEEPSEEK_EXPERTS,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "mlp_bias": True,
            "routed_scaling_factor": 16.0,
        },
    ),
    "deepseek-v3": Variant("deepseek_v3", {**MLA, **DEEPSEEK_EXPERTS, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
    "deepseek-v3-one-group": Variant(
        "deepseek_v3",
        {**MLA, **DEEPSEEK_EXPERTS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "deepseek-v3-halves-dense": Variant("deepseek_v3", {**DENSE, "q_lora_rank": None, "v_head_dim": 32, "rope_interleave": False}),
    "qwen3-moe": Variant("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-every-second": Variant("qwen3_moe", {**EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3-moe-some-plain": Variant(
        "qwen3_moe",
        {**EXPERTS, "mlp_only_layers": [1], "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 12},
    ),
    "gpt-oss": Variant(
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "sliding_window": 12,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "rope_theta": 150000.0,
            },
        },
    ),
    "mixtral": Variant("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": Variant("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 1, "sliding_window": 12}),
}
ROPES = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [1.5 + 0.7 * i for i in range(4)],
    "partial_rotary_factor": 0.5,
}
GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attn_implementation": "eager",  # the others leave the cap out
}
GEMMA4: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 12,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 1.3,
    "tie_word_embeddings": True,
}
NTK: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
MINIMAX_EXPERTS: dict[str, Any] = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
HUNYUAN_V3: dict[str, Any] = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
QWEN2_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
ERNIE_EXPERTS: dict[str, Any] = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2}
LLAMA4: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "intermediate_size": 48,
    "intermediate_size_mlp": 128,
    "attention_chunk_size": 2048,
    "no_rope_layer_interval": 2,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
LINEAR = "linear_attention"
CONV = "conv"
KIMI: dict[str, Any] = {
    **MLA,
    "num_hidden_layers": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_local_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
HYBRID: dict[str, Any] = {**DELTA, "head_dim": 32, "rope_parameters": {**ROPES, "partial_rotary_factor": 0.25}}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
NEMOTRON_H: dict[str, Any] = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
FALCON_H1: dict[str, Any] = {
    **MAMBA2,
    "mamba_d_ssm": 128,
    "embedding_multiplier": 1.4,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.2],
    "key_multiplier": 0.9,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.8, 1.3, 0.9, 1.2, 0.7],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
}
JAMBA: dict[str, Any] = {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8}
STATE_ALONE: dict[str, Any] = {"state_size": 8, "bos_token_id": None, "eos_token_id": None}
CODESTRAL: dict[str, Any] = {**STATE_ALONE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
GPT2: dict[str, Any] = {**ENDLESS, "num_key_value_heads": 4}
WITHOUT_FIELDS = dict.fromkeys(("intermediate_size", "num_key_value_heads"))
OPT: dict[str, Any] = {**ENDLESS, "ffn_dim": 160, "word_embed_proj_dim": 64, "num_key_value_heads": 4}
OLMOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "eos_token_id": None}
WITHOUT_HEADS = dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"))
"""Edits of configs that have none of these fields."""
MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
"""Prompts have several lengths of training, with each of which the temperature of queries rises."""
SMALL4 = {"architectures": ["Mistral4ForCausalLM"]}
MISTRAL4: dict[str, Any] = {**MLA, **DEEPSEEK_EXPERTS, "rope_parameters": MINISTRAL_ROPE}
FAMILIES = {
    "gemma": Variant("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": Variant("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma3": Variant(
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: ROPES},
        },
    ),
    "gemma3-old-config": Variant(
        "gemma3_text",
        {
            **GEMMA,
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: ROPES},
            "layer_types": [SLIDING, FULL] * 2,
        },
        {
            "rope_parameters": None,
            "layer_types": None,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "sliding_window_pattern": 2,
        },
    ),
    "mistral4": Variant("mistral4", MISTRAL4, SMALL4),
    "mistral4-groups": Variant(
        "mistral4",
        {**MISTRAL4, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "attention_bias": True, "q_lora_rank": None},
        SMALL4,
    ),
    "ministral3": Variant("ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL_ROPE}),
    "gemma4": Variant(
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 10.0},
        {"use_bidirectional_attention": "vision"},
    ),
    "gemma4-old-config": Variant(
        "gemma4_text",
        {**GEMMA4, "num_key_value_heads": 4, "attention_bias": True},
        {"per_layer_config": None, "global_head_dim": 64, "num_global_key_value_heads": 1, "rope_parameters": None},
    ),
    "gemma4-moe": Variant(
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4-inputs": Variant(
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "smollm3": Variant("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3-window": Variant(
        "smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 12, "attention_bias": True}
    ),
    "olmo2": Variant("olmo2", {"num_key_value_heads": 4}),
    "olmo2-shared-keys": Variant("olmo2", {"num_key_value_heads": 1}),
    "olmo3": Variant(
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "rope_parameters": {
                FULL: {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 256,
                    "rope_theta": 5e5,
                    "attention_factor": 1.2,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "granite": Variant("granite", GRANITE),
    "phi3": Variant("phi3", {"sliding_window": 12}),
    "phi3-long": Variant("phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "phi3-short": Variant("phi3", {"original_max_position_embeddings": 512, "rope_parameters": LONGROPE}),
    "glm": Variant("glm", {"head_dim": 16}),
    "glm4": Variant("glm4", {"head_dim": 16}),
    "seed-oss": Variant("seed_oss", {"head_dim": 32, "attention_out_bias": True}),
    "exaone4": Variant("exaone4", {"num_hidden_layers": 4, "sliding_window": 12}),
    "exaone4-full": Variant("exaone4", {"sliding_window": None, "layer_types": [FULL] * 3}),
    "starcoder2": Variant("starcoder2", {"sliding_window": 12, "tie_word_embeddings": True}),
    "starcoder2-without-biases": Variant("starcoder2", {"use_bias": False}),
    "nemotron": Variant("nemotron", {"head_dim": 32, "num_hidden_layers": 2}),
    "nemotron-biases": Variant("nemotron", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "arcee": Variant("arcee", {"attention_bias": True, "mlp_bias": True}),
    "internlm3": Variant(
        "internlm3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e4},
        },
        {
            "architectures": ["InternLM3ForCausalLM"],
            "attention_bias": None,
            "mlp_bias": None,
            "qkv_bias": True,
            "bias": True,
            "rope_parameters": None,
            "rope_theta": 50000,
            "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
        },
    ),
    "phi": Variant("phi", {"num_key_value_heads": 4}),
    "stablelm": Variant("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": Variant("stablelm", {"use_parallel_residual": True, "num_key_value_heads": 4}),
    "cohere": Variant("cohere", {"tie_word_embeddings": True}),
    "cohere2": Variant("cohere2", {"num_hidden_layers": 4, "sliding_window": 12, "tie_word_embeddings": True}),
    "qwen2-moe": Variant("qwen2_moe", QWEN2_EXPERTS),
    "qwen2-moe-some-plain": Variant(
        "qwen2_moe",
        {
            **QWEN2_EXPERTS,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
    ),
    "granite-moe": Variant("granitemoe", {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3, "attention_bias": True}),
    "granite-moe-shared": Variant(
        "granitemoeshared", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 96}
    ),
    "ernie": Variant("ernie4_5", {"head_dim": 32, "use_bias": True}),
    "ernie-moe": Variant("ernie4_5_moe", ERNIE_EXPERTS),
    "ernie-moe-some-plain": Variant(
        "ernie4_5_moe",
        {
            **ERNIE_EXPERTS,
            "num_hidden_layers": 5,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
        },
    ),
    "glm4-moe": Variant("glm4_moe", {**DEEPSEEK_EXPERTS, "head_dim": 16, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4-moe-lite": Variant("glm4_moe_lite", {**MLA, **FLASH_EXPERTS, "qk_nope_head_dim": 24, "v_head_dim": 32}),
    "glm4-moe-lite-published": Variant(
        "glm4_moe_lite",
        {**MLA, **FLASH_EXPERTS, "norm_topk_prob": False, "attention_bias": True},
        {
            "mlp_layer_types": None,
            "rope_parameters": None,
            "rope_theta": 10000,
            "rope_scaling": None,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 1,
        },
    ),
    "glm4-moe-groups": Variant(
        "glm4_moe",
        {
            **DEEPSEEK_EXPERTS,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "hunyuan": Variant("hunyuan_v1_dense", {"head_dim": 32, "rope_parameters": NTK, "tie_word_embeddings": True}),
    "hunyuan-moe": Variant(
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 8, "moe_topk": 3, "rope_parameters": NTK},
        {
            "rope_parameters": None,
            "rope_theta": 10000,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
            "moe_topk": [3] * 3,
            "num_shared_expert": [1] * 3,
            "moe_intermediate_size": [128] * 3,
        },
    ),
    "hunyuan-v3": Variant("hy_v3", HUNYUAN_V3),
    "hunyuan-v3-authors-config": Variant(
        "hy_v3",
        {**HUNYUAN_V3, "mlp_layer_types": ["dense", "dense", "sparse"], "attention_bias": True, "num_shared_experts": 2},
        {"mlp_layer_types": None, "first_k_dense_replace": 2, "expert_hidden_dim": 48, "qk_norm": True, "route_norm": True},
    ),
    "deepseek-v3.2": Variant("deepseek_v32", {**INDEXER, "n_group": 4, "topk_group": 2}),
    "deepseek-v3.2-published": Variant(
        "deepseek_v32",
        {
            **INDEXER,
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
            "rope_parameters": {**DEEPSEEK_ROPE, "rope_type": "yarn", "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            "rope_parameters": None,
            "rope_theta": 10000,
            "rope_scaling": {**DEEPSEEK_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
            "layer_types": None,
            "mlp_layer_types": None,
            "head_dim": None,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
    ),
    "glm-5": Variant("glm_moe_dsa", INDEXER),
    "glm-5.2": Variant(
        "glm_moe_dsa",
        {
            **INDEXER,
            "num_hidden_layers": 5,
            "indexer_types": ["full", "full", "shared", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"],
        },
        {"rope_interleave": True, "indexer_rope_interleave": True},
    ),
    "deepseek-v4": Variant(
        "deepseek_v4",
        {
            **COMPRESSED,
            "layer_types": ["sliding_attention", HEAVY_RUNS, RUNS, RUNS],
            "compress_rates": {RUNS: 4, HEAVY_RUNS: 16},
            "sliding_window": 6,
            "num_hash_layers": 2,
        },
    ),
    "deepseek-v4-published": Variant(
        "deepseek_v4",
        {
            **COMPRESSED,
            "compress_ratios": [4, 0, 128, 4],
            "num_hash_layers": 1,
            "rope_parameters": {**V4_ROPE, "rope_type": "yarn"},
            "o_groups": 4,
        },
        {
            "layer_types": None,
            "compress_ratios": [4, 0, 128, 4, 0],
            "compress_rates": None,
            "mlp_layer_types": None,
            "num_hash_layers": 1,
            "partial_rotary_factor": None,
            "rope_parameters": None,
            "rope_scaling": {**V4_ROPE, "type": "yarn"},
            "topk_method": "noaux_tc",
        },
    ),
    "minimax-m2": Variant("minimax_m2", MINIMAX_EXPERTS),
    "minimax-m2-old-config": Variant(
        "minimax_m2",
        {**MINIMAX_EXPERTS, "num_key_value_heads": 1, "rope_parameters": {**ROPES, "partial_rotary_factor": 0.5}},
        {"rope_parameters": None, "rope_theta": 10000, "rotary_dim": 8},
    ),
    "apertus": Variant("apertus", {"attention_bias": True, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 12e6}}),
    "gpt-neox": Variant("gpt_neox", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "gpt-neox-sequential": Variant(
        "gpt_neox",
        {
            "num_key_value_heads": 4,
            "hidden_act": "gelu_fast",
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**ROPES, "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        },
        {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 1000},
    ),
    "gpt2": Variant("gpt2", {**GPT2, "tie_word_embeddings": True}, WITHOUT_FIELDS),
    "gpt2-untied": Variant("gpt2", {**GPT2, "n_inner": 160, "activation_function": "gelu"}, WITHOUT_FIELDS),
    "opt": Variant("opt", {**OPT, "tie_word_embeddings": True}),
    "opt-without-biases": Variant("opt", {**OPT, "enable_bias": False, "activation_function": "gelu"}),
    "olmoe": Variant("olmoe", {**OLMOE, "num_key_value_heads": 4}),
    "olmoe-shared-keys": Variant("olmoe", {**OLMOE, "norm_topk_prob": True, "attention_bias": True}),
    "llama4": Variant("llama4_text", LLAMA4),
    "llama4-chunks": Variant("llama4_text", {**LLAMA4, "attention_chunk_size": 40}),
    "llama4-plain": Variant("llama4_text", {**LLAMA4, "num_local_experts": 0, "moe_layers": [], "interleave_moe_layer_step": 0}),
    "llama4-every-second": Variant(
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "use_qk_norm": False,
            "attention_bias": True,
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5},
        },
    ),
    "qwen3-next": Variant("qwen3_next", {**HYBRID, **QWEN2_EXPERTS}),
    "qwen3-next-some-plain": Variant(
        "qwen3_next",
        {
            **HYBRID,
            **QWEN2_EXPERTS,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "layer_types": [FULL, LINEAR, LINEAR, FULL],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
        {"partial_rotary_factor": 0.25, "rope_parameters": None, "rope_theta": 10000},
    ),
    "olmo-hybrid": Variant("olmo_hybrid", {**DELTA, "num_key_value_heads": 4, "eos_token_id": None}),
    "olmo-hybrid-without-rotation": Variant(
        "olmo_hybrid",
        {
            **DELTA,
            "layer_types": [FULL, LINEAR, FULL, LINEAR],
            "linear_allow_neg_eigval": False,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "granite-hybrid": Variant(
        "granitemoehybrid",
        {
            **MAMBA2,
            **GRANITE,
            "layer_types": [LINEAR, FULL, LINEAR],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid-experts": Variant(
        "granitemoehybrid",
        {
            **MAMBA2,
            **GRANITE,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
            "num_hidden_layers": 4,
            "mamba_n_groups": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "shared_intermediate_size": 64,
            "position_embedding_type": "rope",
        },
        {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "granite-all-attend": Variant(
        "granitemoehybrid",
        {
            **MAMBA2,
            "layer_types": [FULL] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.25,
        },
    ),
    "bamba": Variant("bamba", {**MAMBA2, "attn_layer_indices": [1], "mamba_n_groups": 4, "mlp_bias": True, "attention_bias": True}),
    "nemotron-h": Variant(
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": [LINEAR, "mlp", FULL, "mlp", LINEAR]},
    ),
    "nemotron-h-pattern": Variant(
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": [FULL, LINEAR, LINEAR, "mlp"],
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
        },
        {"layers_block_type": None, "hybrid_override_pattern": "*MM-", "num_hidden_layers": 4},
    ),
    "nemotron-h-experts": Variant(
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": [LINEAR, "moe", FULL, "moe", "mlp"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "falcon-h1": Variant("falcon_h1", FALCON_H1),
    "falcon-h1-normed": Variant(
        "falcon_h1",
        {
            **FALCON_H1,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-gate-last": Variant("falcon_h1", {**MAMBA2, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_proj_bias": True}),
    "jamba": Variant("jamba", {**JAMBA, "num_hidden_layers": 4}),
    "jamba-without-experts": Variant(
        "jamba",
        {
            **JAMBA,
            "num_experts": 1,
            "attn_layer_offset": 0,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
            "mamba_expand": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "mamba": Variant("mamba", {**STATE_ALONE, "tie_word_embeddings": True}, WITHOUT_HEADS),
    "mamba-biases": Variant(
        "mamba", {**STATE_ALONE, "use_bias": True, "use_conv_bias": False, "time_step_rank": 6, "conv_kernel": 3}, WITHOUT_HEADS
    ),
    "falcon-mamba": Variant(
        "falcon_mamba",
        {**STATE_ALONE, "state_size": 16, "expand": 16, "intermediate_size": 96},
        {**WITHOUT_HEADS, "intermediate_size": 96},
    ),
    "mamba2": Variant("mamba2", CODESTRAL, WITHOUT_HEADS),
    "mamba2-biases": Variant(
        "mamba2",
        {**CODESTRAL, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        WITHOUT_HEADS,
    ),
    "qwen3.5": Variant("qwen3_5_text", {**HYBRID, "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}),
    "qwen3.5-moe": Variant(
        "qwen3_5_moe_text",
        {**HYBRID, **QWEN2_EXPERTS, "layer_types": [LINEAR, FULL] * 2, "linear_num_value_heads": 6, "intermediate_size": None},
    ),
    "lfm2": Variant(
        "lfm2",
        {"num_hidden_layers": 4, "layer_types": [CONV, FULL, CONV, CONV], "block_multiple_of": 48, "tie_word_embeddings": True},
    ),
    "lfm2-biases": Variant(
        "lfm2",
        {"layer_types": [FULL, CONV, FULL], "conv_L_cache": 4, "conv_bias": True, "block_auto_adjust_ff_dim": False},
        {"layer_types": None, "full_attn_idxs": [0, 2], "intermediate_size": None, "block_ff_dim": 128},
    ),
    "lfm2-moe": Variant(
        "lfm2_moe",
        {**EXPERTS, "num_hidden_layers": 4, "layer_types": [CONV, FULL] * 2, "num_dense_layers": 1},
    ),
    "kimi-linear": Variant(
        "kimi_linear",
        {**KIMI, "layer_types": [LINEAR, FULL, LINEAR, FULL], "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "kimi-linear-old-config": Variant(
        "kimi_linear",
        {**KIMI, "q_lora_rank": None, "n_group": 4, "topk_group": 2, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]},
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "linear_num_heads": None,
            "linear_head_dim": None,
            "linear_conv_kernel_dim": None,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2, 4],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "afmoe": Variant(
        "afmoe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "num_shared_experts": 1,
            "route_scale": 1.5,
            "mup_enabled": True,
        },
    ),
    "biogpt": Variant("biogpt", {**GPT2, "tie_word_embeddings": True}, {"num_key_value_heads": None}),
    "chatglm": Variant(
        "glm",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": {**ROPES, "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
        {
            "architectures": ["ChatGLMModel"],
            **dict.fromkeys(("hidden_act", "head_dim", "rope_parameters", "num_hidden_layers", "vocab_size", "intermediate_size")),
            **dict.fromkeys(("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "attention_bias")),
            "num_layers": 3,
            "padded_vocab_size": VOCAB,
            "ffn_hidden_size": 128,
            "kv_channels": 16,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 2048,
            "layernorm_epsilon": 1.5625e-07,
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "rmsnorm": True,
            "rope_ratio": 500,
        },
        chatglm,
    ),
    "cwm": Variant(
        "cwm",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e6},
        },
        {"layer_types": None},
    ),
    "dots1": Variant("dots1", {**DEEPSEEK_EXPERTS, "head_dim": 16, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}),
    "dots1-windows": Variant(
        "dots1", {**DEEPSEEK_EXPERTS, "head_dim": 16, "attention_bias": True, "sliding_window": 12, "max_window_layers": 1}
    ),
    "exaone": Variant(
        "llama",
        {"head_dim": 16, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e6}},
        {
            "architectures": ["ExaoneForCausalLM"],
            **dict.fromkeys(("hidden_act", "num_hidden_layers", "rms_norm_eps", "rope_parameters")),
            "activation_function": "silu",
            "num_layers": 3,
            "layer_norm_epsilon": 1e-6,
            "rope_theta": 1e6,
            "rope_scaling": LLAMA3_ROPE,
        },
        exaone,
    ),
    "exaone-moe": Variant("exaone_moe", {**EXPERTS, "num_hidden_layers": 4, "sliding_window": 12, "n_group": 4, "topk_group": 2}),
    "falcon": Variant("falcon", {**ENDLESS, "tie_word_embeddings": True}, WITHOUT_FIELDS),
    "falcon-new": Variant(
        "falcon",
        {**ENDLESS, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 160},
        WITHOUT_FIELDS,
    ),
    "falcon-sequential": Variant("falcon", {**ENDLESS, "multi_query": False, "parallel_attn": False, "bias": True}, WITHOUT_FIELDS),
    "flex-olmo": Variant("flex_olmo", OLMOE),
    "gemma4-unified": Variant(
        "gemma4_unified_text",
        {
            **{name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"},
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gptj": Variant("gptj", {**GPT2, "rotary_dim": 8}, WITHOUT_FIELDS),
    "gpt-bigcode": Variant("gpt_bigcode", {**ENDLESS, "tie_word_embeddings": True}, WITHOUT_FIELDS),
    "gpt-neo": Variant(
        "gpt_neo",
        {**GPT2, "attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 12, "tie_word_embeddings": True},
        {"num_key_value_heads": None},
    ),
    "granite-swa": Variant(
        "granite_swa", {**GRANITE, "num_hidden_layers": 4, "sliding_window": 12, "layer_rope_theta": [0, 1e4, 5e5, 1e4]}
    ),
    "granite-moe-swa": Variant(
        "granitemoe_swa",
        {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 96, "sliding_window": 12},
    ),
    "hyperclovax": Variant("hyperclovax", {**GRANITE, "attention_bias": True}),
    "hyperclovax-plain": Variant("hyperclovax", {"use_post_norm": False, "head_dim": 32}),
    "internlm2": Variant(
        "llama",
        {},
        {"architectures": ["InternLM2ForCausalLM"], "bias": False, "attention_bias": None, "mlp_bias": None, "head_dim": None},
        internlm2,
    ),
    "jais2": Variant("jais2"),
    "lfm3": Variant(
        "lfm3",
        {
            "head_dim": 32,
            "num_hidden_layers": 5,
            "sliding_window": 12,
            "layer_types": [CONV, SLIDING, FULL, CONV, SLIDING],
            "rope_parameters": {
                SLIDING: ROPES,
                FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "lfm3-plain": Variant(
        "lfm3",
        {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 12, "use_sandwich_norm": False, "use_attention_gate": False},
        {"layer_types": None},
    ),
    "mellum": Variant(
        "mellum",
        {
            **EXPERTS,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 12,
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, SLIDING: ROPES},
        },
    ),
    "mimo": Variant("qwen2", {}, {"architectures": ["MiMoForCausalLM"]}),
    "minicpm": Variant(
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 3**0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        {
            "architectures": ["MiniCPMForCausalLM"],
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")),
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 32,
        },
    ),
    "minicpm3": Variant("minicpm3", {**MLA, "dim_model_base": 48, "tie_word_embeddings": True}),
    "solar-open": Variant(
        "solar_open",
        {**FLASH_EXPERTS, "head_dim": 16, "attention_bias": True, "n_group": 2, "topk_group": 1},
    ),
    "vaultgemma": Variant("vaultgemma", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "youtu": Variant("youtu", {**MLA, "attention_bias": True}),
    "qwen2-moe-every-second": Variant("qwen2_moe", {**QWEN2_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
}
"""Families beside Llama's; each row is what one is checked against."""
WHOLE_BLOCKS = Variant("qwen3_moe", {**VARIANTS["qwen3-moe"].changes, "moe_intermediate_size": 64, "tie_word_embeddings": True})
"""Experts whose rows are whole blocks of GGUF's types."""


@dataclass(frozen=True)
class Reference:
    """What transformers makes of a checkpoint: logits [PROMPT + STEPS, VOCAB] fp32 along prompt and greedy tokens."""

    folder: Path
    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


def write_checkpoint(folder: Path, variant: Variant, dtype: torch.dtype = torch.float32, **save: Any) -> PreTrainedModel:
    """Writes the variant with seeded weights to `folder` and returns the model. `save` goes to save_pretrained."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[variant.model_type](**deepcopy({**BASE, **variant.changes}))  # transformers changes what it gets
    # transformers 5.23 has Mistral 4 among models with images alone
    model = Mistral4ForCausalLM(config) if variant.model_type == "mistral4" else AutoModelForCausalLM.from_config(config)
    spread(model)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **save)
    edit_json(folder / "config.json", variant.edits)
    if variant.rewrite is not None:
        file = folder / "model.safetensors"
        save_file(variant.rewrite(load_file(file)), file)
    return model


def write_servable(folder: Path, variant: Variant) -> None:
    """Writes the variant with the tokenizer of the repository's own model, and as many rows as that has tokens."""
    write_checkpoint(folder, replace(variant, changes={**variant.changes, "vocab_size": 4096}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(__file__).parents[2] / "models" / "starling-pydoc" / name, folder)


def make_reference(folder: Path, variant: Variant, dtype: torch.dtype = torch.float32, steps: int = STEPS) -> Reference:
    """Each is computed once in a process, whoever asks for it. Random numbers go on as if it were computed again."""
    made = _made.get(key := repr((variant, dtype, steps)))
    if made is None:
        reference = answer(folder, write_checkpoint(folder, variant, dtype), steps)
        written = (path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name.endswith("config.json"))
        files = {path.name: path.read_bytes() for path in written}
        _made[key] = reference, files, torch.get_rng_state()
        return reference
    reference, files, state = made
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(state)
    return replace(reference, folder=folder)


_made: dict[str, tuple[Reference, dict[str, bytes], torch.Tensor]] = {}
"""What this process has computed, with the files of the checkpoint and the state of the random numbers behind it."""


def answer(folder: Path, model: PreTrainedModel, steps: int = STEPS) -> Reference:
    """`folder` is where the model was saved."""
    prompt = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model.generate(prompt, max_new_tokens=steps, do_sample=False, eos_token_id=None)
        logits = model(whole).logits[0].float()
    return Reference(folder, prompt[0].tolist(), whole[0, PROMPT:].tolist(), logits)


def spread(model: PreTrainedModel) -> None:
    """Weights with which greedy output varies and depends on the context, and no bias or norm is trivial."""
    for name, weight in model.named_parameters():
        if "embed_tokens" in name or "embed_in" in name:
            torch.nn.init.normal_(weight, std=1.0)
        elif name.endswith("A_log"):
            torch.nn.init.normal_(weight, mean=-1.5, std=1.0)  # decays of some 0.3 to 0.98 a token
        elif name.endswith("dt_bias"):
            torch.nn.init.normal_(weight, std=0.5)
        elif weight.dim() >= 2:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.5
            torch.nn.init.normal_(weight, std=gain * weight.shape[-1] ** -0.5)
        else:
            torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.2)  # around 0 for a bias, and where a norm adds 1
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.2)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.2)
        elif name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), 8).topk(buffer.shape[1]).indices)


def edit_json(path: Path, edits: dict[str, Any]) -> None:
    """Sets fields of a JSON file; None deletes one."""
    values = {**json.loads(path.read_text()), **edits}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
