"""Writes a small Qwen3-MoE shape with random weights and the repository's own tokenizer: 8 experts, 2 for a token.

usage: moe_checkpoint.py FOLDER
"""

import sys
from pathlib import Path

import torch
from checkpoint import save

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, EXPERTS, INNER, VOCAB = 512, 8, 8, 4, 64, 8, 384, 8192
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": 4 * INNER,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCAB,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
}


def tensors() -> dict[str, torch.Tensor]:
    """Scaled so that greedy output varies and depends on the context."""
    named = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN) * 1.5 * HIDDEN**-0.5,
    }
    matrices = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN, 3.0),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN, 3.0),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN, 1.5),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM, 1.5),
        "mlp.gate": (EXPERTS, HIDDEN, 1.5),
    }
    for expert in range(EXPERTS):
        matrices |= {f"mlp.experts.{expert}.{name}_proj": (INNER, HIDDEN, 1.5) for name in ("gate", "up")}
        matrices[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, INNER, 1.5)
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN, "self_attn.q_norm": DIM, "self_attn.k_norm": DIM}
    for layer in range(LAYERS):
        for name, (rows, columns, gain) in matrices.items():
            named[f"model.layers.{layer}.{name}.weight"] = torch.randn(rows, columns) * gain * columns**-0.5
        for name, size in norms.items():
            named[f"model.layers.{layer}.{name}.weight"] = torch.ones(size)
    return {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}


def write(folder: Path) -> None:
    save(folder, CONFIG, tensors)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
