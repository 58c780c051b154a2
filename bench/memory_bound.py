"""How near decoding at batch 1 comes to the memory-read limit: every token reads every weight.

The memory of a shared machine is twice as fast in one minute as in the next, so the limit is measured right before and after
each try, and the figure is the median of the tries' ratios.
"""

import statistics
import time
from pathlib import Path

import torch
from starling_engine import LLM, SamplingParams

FLOATS = 150_000_000
READS = 4
TRIES = 15
PROMPT, NEW = 32, 64


def report(model: Path, threads: int) -> list[str]:
    torch.set_num_threads(threads)
    data = torch.ones(FLOATS)
    size = (model / "model.safetensors").stat().st_size
    shares, tokens, reads = [], [], []
    with LLM(str(model), max_model_len=2048, kv_cache_memory_bytes=1 << 30, num_threads=threads, seed=0) as engine:
        _output_tokens_per_second(engine)
        for _ in range(TRIES):
            before = _bytes_per_second(data)
            tokens.append(_output_tokens_per_second(engine))
            reads.append((before + _bytes_per_second(data)) / 2)
            shares.append(tokens[-1] * size / reads[-1])
    low, middle, high = statistics.quantiles(shares, n=4)
    return [
        f"### Batch 1 against the memory's speed, {threads} thread{'s' if threads > 1 else ''}",
        "",
        f"Memory reads at {statistics.median(reads) / 1e9:.1f} GB/s and a token reads {size / 1e9:.2f} GB of weights. {PROMPT} in,"
        f" {NEW} out: {statistics.median(tokens):.1f} output tokens/s, prompt included: {middle:.0%} of the limit (median of"
        f" {TRIES} tries, each beside its own reading of the limit; half of them in {low:.0%} to {high:.0%}).",
    ]


def _bytes_per_second(data: torch.Tensor) -> float:
    """The best of some sums over 600 MB, which read and do next to nothing else."""
    best = float("inf")
    for _ in range(READS):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return data.numel() * data.element_size() / best


def _output_tokens_per_second(engine: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    began = time.perf_counter()
    engine.generate([{"prompt_token_ids": list(range(100, 100 + PROMPT))}], params, use_tqdm=False)
    return NEW / (time.perf_counter() - began)
