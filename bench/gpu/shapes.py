"""The models that are measured: configs without weights, and small ones of the same kinds for a machine without a GPU."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from starling_engine.model_config.config import ModelConfig, load_model_config

OWN_MODEL = Path(__file__).parents[2] / "models" / "starling-pydoc"

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
    "head_dim": 128,
}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936}
_QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0}
_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "rope_theta": 10000.0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 3,
}
_TOY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TOY_SIZES = {"intermediate_size": 96, "vocab_size": 4096}


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
    }


def _experts(experts: int, top_k: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _COMMON | _QWEN3 | _sizes(1024, 28, 16, 8, 3072) | {"tie_word_embeddings": True},
    "Llama-3-8B": _COMMON | _LLAMA | _sizes(4096, 32, 32, 8, 14336),
    "30B-A3B": _COMMON | _QWEN3_MOE | _sizes(2048, 48, 32, 4, 6144) | _experts(128, 8, 768),
}
"""Configs as a checkpoint has them, in bf16."""

LARGE: dict[str, dict[str, Any]] = {"DeepSeek-V3": _COMMON | _DEEPSEEK_V3 | _sizes(7168, 61, 128, 128, 18432)}
"""Models that no card holds: what they launch is looked at without one."""

TOYS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": SHAPES["Qwen3-0.6B"] | _TOY | _TOY_SIZES,
    "Llama-3-8B": SHAPES["Llama-3-8B"] | _TOY | _TOY_SIZES,
    "30B-A3B": SHAPES["30B-A3B"] | _TOY | _TOY_SIZES | _experts(8, 2, 32),
}


def model_folder(name: str, *, toy: bool, root: Path | None = None) -> Path:
    """A folder with the config and the repository's own tokenizer, in `root` or a new place. There are no weights in it."""
    folder = (root or Path(tempfile.mkdtemp(prefix="starling-gpu-"))) / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(OWN_MODEL / file, folder / file)
    (folder / "config.json").write_text(json.dumps((TOYS if toy else SHAPES)[name], indent=2))
    return folder


def model_config(name: str, *, toy: bool) -> ModelConfig:
    with tempfile.TemporaryDirectory() as root:
        return load_model_config(model_folder(name, toy=toy, root=Path(root)))
