"""Writes starling-random-moe: a small model of experts whose weights are random, for layouts and changes of size to be tried on.

    python models/random_moe.py --out models/starling-random-moe

Its text means nothing, but its greedy output varies and depends on the context: the weights are spread wider than a model starts
with, which would repeat one token whatever its experts do.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

TOKENIZER = Path(__file__).parent / "starling-pydoc"
CONFIG = Qwen3MoeConfig(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=48,
    norm_topk_prob=True,
    vocab_size=4096,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "starling-random-moe")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = AutoModelForCausalLM.from_config(CONFIG)
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(weight, std=1.0)
        elif weight.dim() >= 2:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.5
            torch.nn.init.normal_(weight, std=gain * weight.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, arguments.out / name)


if __name__ == "__main__":
    main()
