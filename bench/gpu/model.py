"""One model in one engine: decoding steps, a long prompt, and which kernels take the time.

A decoding step's time is the difference between a long and a short answer to the same prompts, over the difference in tokens: what
the prompts cost, and that requests start and end one after another, is in both. Prompts are found again in the cache, but for the
one whose time is measured. A batch is as large as the KV cache allows.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from starling_engine import LLM

from bench.gpu.busy import watched
from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.engines import engine, prompts, room, seconds
from bench.gpu.profile import profile_rows
from bench.gpu.roofline import Limits, StepRow, step_cost
from bench.gpu.shapes import SHAPES, model_config
from bench.gpu.table import Row, quantity

DECODE_GOALS = {"Llama-3-8B": 0.85, "Qwen3-0.6B": 0.6}
PROMPT_GOALS = {"Llama-3-8B": 0.7}
SHORT, LONG = 40, 168
CONTEXT = 1024
"""Tokens in the middle of the difference."""
MEASURE_SECONDS = 12.0
"""Room is left for the tries of one figure, of which there are one to three."""

assert {*DECODE_GOALS, *PROMPT_GOALS} <= {*SHAPES}


def rows(
    *,
    toy: bool,
    shape: str,
    batches: tuple[int, ...],
    prompt: int = 0,
    profiled: int = 0,
    cache: str = "auto",
    quantization: str | None = None,
) -> Iterator[Row]:
    """Yields rows of decodes in `batches`, of a prompt of so many tokens, and of a `profiled` batch's kernels; 0: not these.

    Limits are those of weights in bf16, also where they are quantized.
    """
    limits = measure_limits(make_clock(toy=toy))
    torch.cuda.empty_cache()
    if toy:
        batches, prompt, profiled = (1, 4), min(prompt, 64), min(profiled, 4)
    least = 64 if toy else 2048
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as name,
        watched(Path(name)),
        engine(
            shape,
            toy=toy,
            max_model_len=max(prompt, least) + 16,
            max_num_batched_tokens=max(prompt, least, 256),
            max_num_seqs=256,
            kv_cache_dtype=cache,
            quantization=quantization,
            enable_prefix_caching=True,
        ) as llm,
    ):
        kind = f"{shape}, weights in {quantization}" if quantization else f"{shape}, fp8 cache" if cache == "fp8" else shape
        measured = Measured(llm, shape, limits, kind, toy=toy, fp8=cache == "fp8", goals=cache == "auto" and quantization is None)
        measured.ask(1, 1)
        yield Row(f"{measured.what}: from the start of an engine to its first token", f"{time.perf_counter() - began:.1f} s")
        for number, batch in enumerate(batches):
            yield measured.decode(batch)
            if number == 1 and prompt:  # worth more than the largest batch, which takes longest
                yield from measured.prefill(prompt)
        if profiled:
            yield from profile_rows(Path(name), measured.what, lambda: measured.ask(profiled, measured.long), f"{profiled} decodes")
        if profiled and prompt:
            yield from profile_rows(Path(name), measured.what, lambda: measured.ask_anew(prompt), f"a prompt of {prompt}")


class Measured:
    """An engine, and the prompts that it is asked."""

    def __init__(self, llm: LLM, shape: str, limits: Limits, what: str, *, toy: bool, fp8: bool, goals: bool) -> None:
        self.what, self._goals = what, goals
        self.short, self.long, self._context = (4, 12, 32) if toy else (SHORT, LONG, CONTEXT)
        self._llm, self._shape, self._limits = llm, shape, limits
        self._model, self._cached = model_config(shape, toy=toy), 1 if fp8 else None
        self._random = torch.Generator().manual_seed(0)
        self._prompts = prompts(256, self._context - (self.short + self.long) // 2, self._random)

    def ask(self, batch: int, new: int) -> float:
        """Seconds of the first so many prompts."""
        return seconds(self._llm, self._prompts[:batch], new)

    def ask_anew(self, tokens: int) -> float:
        """Seconds to the first token of a prompt that has not been there."""
        return seconds(self._llm, prompts(1, tokens, self._random), 1)

    def decode(self, wanted: int) -> Row:
        batch = min(wanted, room(self._llm, self._context + self.long))
        self.ask(batch, self.long)
        step = _median(lambda: (self.ask(batch, self.long) - self.ask(batch, self.short)) / (self.long - self.short))
        least = self._limits.seconds(step_cost(self._model, [StepRow(1, self._context)] * batch, self._cached))
        what = f"{self.what}, batch {batch}, context {self._context}: a step"
        goal = DECODE_GOALS.get(self._shape) if self._goals else None
        return Row(what, quantity(step, "s"), quantity(least, "s"), least / step, goal)

    def prefill(self, tokens: int) -> Iterator[Row]:
        cost = step_cost(self._model, [StepRow(tokens, tokens)], self._cached)
        self.ask_anew(tokens)
        took = _median(lambda: self.ask_anew(tokens))
        what, rate = f"{self.what}, 1 x {tokens} tokens: time to the first token", cost.flops / took
        yield Row(what, quantity(took, "s"), quantity(self._limits.seconds(cost), "s"))
        share = rate / self._limits.rate
        goal = PROMPT_GOALS.get(self._shape) if self._goals else None
        yield Row("its products and attention", quantity(rate, "FLOP/s"), quantity(self._limits.rate, "FLOP/s"), share, goal)


def _median(measure: Callable[[], float]) -> float:
    """Returns the median of three tries, or of those for which there is time."""
    found, end = [], time.monotonic() + MEASURE_SECONDS
    while len(found) < 3 and (not found or time.monotonic() < end):
        found.append(measure())
    return statistics.median(found)
