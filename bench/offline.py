"""One engine's offline figures: start-up, decode and prefill throughput. The same script drives Starling and the peer, whose
`LLM` and `SamplingParams` have the same names; only the import line differs.

usage: offline.py starling_engine|vllm MODEL THREADS [QUANTIZATION]

Prints the seconds up to a first token, then for each line "BATCH PROMPT NEW" the seconds of such a batch (see side.py).
"""

import time

BEGAN = time.time()

import importlib  # noqa: E402 - the clock starts before anything is loaded
import os  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

START = "start-up to first token (s)"
BATCHES = {
    "decode batch 1 (32 in, 64 out) (tokens/s)": (1, 32, 64),
    "decode batch 8 (128 in, 64 out) (tokens/s)": (8, 128, 64),
    "decode batch 32 (128 in, 64 out) (tokens/s)": (32, 128, 64),
    "prefill 1 x 1024 (tokens/s)": (1, 1024, 1),
    "prefill 8 x 512 (tokens/s)": (8, 512, 1),
}
"""Requests of a batch, tokens of each one's prompt, and new tokens of each, by the figure's name."""
TRIES = 3
KV_BYTES = 4 << 30


def make_engine(package: str, model: str, threads: int, quantization: str | None) -> tuple[Any, Any]:
    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "kv_cache_memory_bytes": KV_BYTES, "seed": 0}
    arguments["enable_prefix_caching"] = False
    if quantization is not None:
        arguments["quantization"] = quantization
    if package == "vllm":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if threads == 1 else f"0-{threads - 1}"
    else:
        arguments["num_threads"] = threads
    module = importlib.import_module(package)
    return module.LLM(model, **arguments), module.SamplingParams


def rate(batch: int, prompt: int, new: int, seconds: float) -> float:
    """Returns tokens/s: the prompts' where there is one new token each, else the new ones."""
    return batch * (prompt if new == 1 else new) / seconds


def seconds(engine: Any, params: Any, batch: int, prompt: int) -> float:
    """Of one batch of random prompts; the best of TRIES, for the machine is shared."""
    best = float("inf")
    for _ in range(TRIES):
        prompts = [{"prompt_token_ids": random.choices(range(100, 3000), k=prompt)} for _ in range(batch)]
        began = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    package, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    quantization = sys.argv[4] if len(sys.argv) > 4 else None
    random.seed(0)
    engine, sampling_params = make_engine(package, model, threads, quantization)

    def greedy(tokens: int) -> Any:
        return sampling_params(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    engine.generate([{"prompt_token_ids": list(range(100, 132))}], greedy(1), use_tqdm=False)
    print(time.time() - BEGAN, flush=True)
    for line in sys.stdin:
        batch, prompt, new = map(int, line.split())
        print(seconds(engine, greedy(new), batch, prompt), flush=True)


if __name__ == "__main__":
    main()
