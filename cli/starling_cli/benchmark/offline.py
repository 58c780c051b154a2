"""Benchmarks without a server: the engine in this process."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starling_cli.benchmark.acceptance import Acceptance, DraftCounts, accepted_between
from starling_cli.benchmark.records import Record, Spread

if TYPE_CHECKING:
    from starling_engine import LLM, SamplingParams


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Times of one batch, over `iterations` runs. `ttft` is a run that ends with its first tokens; `itl_ms` the mean gap later.

    Without drafts, `drafts` is None.
    """

    batch_size: int
    iterations: int
    output_tokens: int
    ttft: Spread
    latency: Spread
    itl_ms: float
    drafts: Acceptance | None


def measure_latency(llm: "LLM", prompts: Sequence[Sequence[str]], output_tokens: int, warmup: int) -> LatencyResult:
    """`prompts` holds a batch for each run, so that no run finds the last one's prompts in the cache."""
    from starling_engine import SamplingParams

    whole = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for batch in prompts[:warmup]:
        _timed(llm, batch, whole)
    ttfts, latencies = [], []
    before = DraftCounts.of(llm.engine.stats)
    for i, batch in enumerate(prompts[warmup:]):
        # Other texts for the run that ends with its first token: both must prefill.
        ttfts.append(_timed(llm, [f"{i} {prompt}" for prompt in batch], first))
        latencies.append(_timed(llm, batch, whole))
    ttft, latency = Spread.of(ttfts), Spread.of(latencies)
    assert ttft is not None and latency is not None, "there was at least one measured run"
    gap = (statistics.mean(latencies) - statistics.mean(ttfts)) / max(1, output_tokens - 1)
    drafts = accepted_between(before, DraftCounts.of(llm.engine.stats))
    return LatencyResult(len(prompts[0]), len(latencies), output_tokens, ttft, latency, gap * 1000, drafts)


def measure_throughput(llm: "LLM", prompts: Sequence[str], output_tokens: int) -> tuple[list[Record], float, Acceptance | None]:
    """Runs all prompts at once. Single requests are not timed; only their tokens count, and their drafts."""
    from starling_engine import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=output_tokens, ignore_eos=True, seed=0)
    before = DraftCounts.of(llm.engine.stats)
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params)
    seconds = time.perf_counter() - began
    records = [
        Record(began, prompt_tokens=len(o.prompt_token_ids), output_tokens=sum(len(c.token_ids) for c in o.outputs))
        for o in outputs
    ]
    return records, seconds, accepted_between(before, DraftCounts.of(llm.engine.stats))


def _timed(llm: "LLM", batch: Sequence[str], params: "SamplingParams") -> float:
    began = time.perf_counter()
    llm.generate(list(batch), params)
    return time.perf_counter() - began
