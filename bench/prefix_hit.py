"""What a prefix hit saves: time to first token of a prompt whose first 1,024 tokens are cached, against one with none."""

import random
import statistics
import time
from pathlib import Path

from starling_engine import LLM, SamplingParams

PREFIX = 1024
TAIL = 8
TRIES = 7


def first_token_seconds(engine: LLM, prompt: list[int]) -> float:
    began = time.perf_counter()
    engine.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - began


def report(model: Path, threads: int) -> list[str]:
    rng = random.Random(0)
    misses, hits = [], []
    with LLM(str(model), max_model_len=2048, kv_cache_memory_bytes=1 << 30, num_threads=threads) as engine:
        for _ in range(TRIES):
            prefix = rng.choices(range(100, 3000), k=PREFIX)
            misses.append(first_token_seconds(engine, prefix + rng.choices(range(100, 3000), k=TAIL)))
            hits.append(first_token_seconds(engine, prefix + rng.choices(range(100, 3000), k=TAIL)))
    miss, hit = statistics.median(misses), statistics.median(hits)
    return [
        f"### Prefix hit of {PREFIX:,} tokens, {threads} threads",
        "",
        f"Time to first token: miss {1e3 * miss:.0f} ms, hit {1e3 * hit:.0f} ms: {hit / miss:.1%} (medians of {TRIES}).",
    ]
