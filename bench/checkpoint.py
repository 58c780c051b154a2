"""Writes the checkpoint that benchmarks run: a Qwen3-0.6B shape with random weights and the repository's own tokenizer.

usage: checkpoint.py FOLDER
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CACHE = Path(os.environ.get("STARLING_CACHE", Path.home() / ".cache" / "starling")) / "bench"
OWN_MODEL = Path(__file__).parents[1] / "models" / "starling-pydoc"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
}


def tensors() -> dict[str, torch.Tensor]:
    """Weights scaled so that greedy output varies: by default a random model repeats one token whatever attention does."""
    hidden, heads, kv_heads, dim, inner = 1024, 16, 8, 128, 3072
    named = {"model.embed_tokens.weight": torch.randn(CONFIG["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (heads * dim, hidden, 3.0),
            "self_attn.k_proj": (kv_heads * dim, hidden, 3.0),
            "self_attn.v_proj": (kv_heads * dim, hidden, 1.5),
            "self_attn.o_proj": (hidden, heads * dim, 1.5),
            "mlp.gate_proj": (inner, hidden, 1.5),
            "mlp.up_proj": (inner, hidden, 1.5),
            "mlp.down_proj": (hidden, inner, 1.5),
        }
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, gain) in shapes.items():
            named[f"{prefix}.{name}.weight"] = torch.randn(rows, columns) * gain * columns**-0.5
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", dim),
            ("self_attn.k_norm", dim),
        ):
            named[f"{prefix}.{name}.weight"] = torch.ones(size)
    return {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}


def write(folder: Path) -> None:
    save(folder, CONFIG, tensors)


def write_llama(folder: Path) -> None:
    """Writes the same shape as a Llama, which norms neither queries nor keys."""
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    save(
        folder,
        config,
        lambda: {name: tensor for name, tensor in tensors().items() if not name.endswith(("q_norm.weight", "k_norm.weight"))},
    )


def save(folder: Path, config: dict[str, Any], tensors: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Does nothing when the checkpoint is there already."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(OWN_MODEL / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
