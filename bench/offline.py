"""One engine's offline figures: start-up, decode and prefill throughput. The same script drives Starling and the peer, whose
`LLM` and `SamplingParams` have the same names; only the import line differs.

usage: offline.py starling_engine|vllm MODEL THREADS [QUANTIZATION]      prints one line of JSON
"""

import time

BEGAN = time.time()

import importlib  # noqa: E402 - the clock starts before anything is loaded
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

DECODE = ((1, 32, 64), (8, 128, 64), (32, 128, 64))
PREFILL = ((1, 1024), (8, 512))
TRIES = 3
KV_BYTES = 4 << 30


def make_engine(package: str, model: str, threads: int, quantization: str | None) -> tuple[Any, Any]:
    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "enable_prefix_caching": False, "seed": 0}
    if quantization is not None:
        arguments["quantization"] = quantization
    if package == "vllm":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_BYTES >> 30)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0" if threads == 1 else f"0-{threads - 1}"
    else:
        arguments.update(num_threads=threads, kv_cache_memory_bytes=KV_BYTES)
    module = importlib.import_module(package)
    return module.LLM(model, **arguments), module.SamplingParams


def decode_name(batch: int, prompt: int, new: int) -> str:
    return f"decode batch {batch} ({prompt} in, {new} out) (tokens/s)"


def prefill_name(batch: int, prompt: int) -> str:
    return f"prefill {batch} x {prompt} (tokens/s)"


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
    figures = {"start-up to first token (s)": time.time() - BEGAN}
    for batch, prompt, new in DECODE:
        figures[decode_name(batch, prompt, new)] = batch * new / seconds(engine, greedy(new), batch, prompt)
    for batch, prompt in PREFILL:
        figures[prefill_name(batch, prompt)] = batch * prompt / seconds(engine, greedy(1), batch, prompt)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
