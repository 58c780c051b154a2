"""Measures how near decoding at batch 1 comes to the memory-read limit: every token reads every weight.

A recurrent state is read and written by each token, so it counts twice.

The memory of a shared machine is twice as fast in one minute as in the next, so the limit is measured right before and after
each try, and the figure is the median of the tries' ratios.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from starling_engine import LLM, SamplingParams
from starling_engine.kv.layer_specs import state_specs
from starling_engine.model_config.config import load_model_config

FLOATS = 150_000_000
READS = 4
TRIES = 15
SETTLE_SECONDS = 0.1
"""OpenMP's threads spin for some milliseconds after a sum. Beside them the engine's threads would sleep for half a second."""
PROMPT, NEW = 32, 64


BITS = {None: 16.0, "int8": 8.125, "int4": 4.5}
"""Bits of a weight, with its share of a scale, by the engine's `quantization`."""


def report(model: Path, threads: int) -> list[str]:
    lines = [
        f"### Batch 1 against the memory's speed, {threads} thread{'s' if threads > 1 else ''}",
        "",
        f"Steps after a prompt of {PROMPT} tokens, {NEW} new ones; medians of {TRIES} tries, each beside its own reading of the"
        " memory's speed.",
        "",
        "| weights | GB a token | memory reads (GB/s) | tokens/s | of the limit | half of the tries |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    torch.set_num_threads(threads)
    data = torch.ones(FLOATS)
    return [*lines, *(_row(model, threads, quantization, data) for quantization in BITS)]


def _row(model: Path, threads: int, quantization: str | None, data: torch.Tensor) -> str:
    size = (model / "model.safetensors").stat().st_size * BITS[quantization] / 16 + 2 * state_bytes(model)
    shares, tokens, reads = [], [], []
    settings: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 30, "num_threads": threads, "seed": 0}
    with LLM(str(model), quantization=quantization, enable_prefix_caching=False, **settings) as engine:
        _tokens_per_second(engine)
        for _ in range(TRIES):
            before = _bytes_per_second(data)
            tokens.append(_tokens_per_second(engine))
            reads.append((before + _bytes_per_second(data)) / 2)
            shares.append(tokens[-1] * size / reads[-1])
    low, middle, high = statistics.quantiles(shares, n=4)
    return (
        f"| {quantization or 'bfloat16'} | {size / 1e9:.2f} | {statistics.median(reads) / 1e9:.1f} |"
        f" {statistics.median(tokens):.1f} | {middle:.0%} | {low:.0%} to {high:.0%} |"
    )


def state_bytes(model: Path) -> int:
    """Returns the bytes of a sequence's recurrent state in all layers; 0 for a model without any."""
    specs = state_specs(load_model_config(model)).values()
    return sum(part.rows * part.row_bytes for spec in specs for part in spec.parts)


def _bytes_per_second(data: torch.Tensor) -> float:
    """The best of some sums over 600 MB, which read and do next to nothing else."""
    best = float("inf")
    for _ in range(READS):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    time.sleep(SETTLE_SECONDS)
    return data.numel() * data.element_size() / best


def _tokens_per_second(engine: LLM) -> float:
    """Takes the time of a request, less that of one with a single new token: steps alone."""
    return (NEW - 1) / (_seconds(engine, NEW) - _seconds(engine, 1))


def _seconds(engine: LLM, new: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    engine.generate([{"prompt_token_ids": list(range(100, 100 + PROMPT))}], params, use_tqdm=False)
    return time.perf_counter() - began
