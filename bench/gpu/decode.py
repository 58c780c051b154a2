"""How near a decoding step comes to the time in which the device reads what the step needs.

A step's time is the difference between a long and a short answer to prompts of one length, over the difference in tokens: what
the prompts cost, and that requests start and end one after another, is in both.
"""

import statistics
from collections.abc import Iterator

import torch

from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.engines import engine, prompts, seconds
from bench.gpu.roofline import StepRow, step_cost
from bench.gpu.shapes import SHAPES, model_config
from bench.gpu.table import Row, quantity

GOALS = {"Llama-3-8B": 0.85, "Qwen3-0.6B": 0.6}
SHORT, LONG, TRIES = 40, 168, 3
CONTEXT = 1024
"""Tokens in the middle of the difference."""


def rows(*, toy: bool) -> Iterator[Row]:
    limits = measure_limits(make_clock(toy=toy))
    torch.cuda.empty_cache()
    short, long, context, batches = (4, 12, 32, (1, 4)) if toy else (SHORT, LONG, CONTEXT, (1, 64))
    random = torch.Generator().manual_seed(0)
    for shape, dtype in (("Llama-3-8B", "auto"), ("Qwen3-0.6B", "auto"), ("30B-A3B", "auto"), ("Llama-3-8B", "fp8")):
        model, cached = model_config(shape, toy=toy), 1 if dtype == "fp8" else None
        with engine(shape, toy=toy, max_model_len=context + long, kv_cache_dtype=dtype) as llm:
            for batch in batches:

                def measure(new: int, batch: int = batch) -> float:
                    return seconds(llm, prompts(batch, context - (short + long) // 2, random), new)

                measure(long)
                steps = [(measure(long) - measure(short)) / (long - short) for _ in range(TRIES)]
                step, least = statistics.median(steps), limits.seconds(step_cost(model, [StepRow(1, context)] * batch, cached))
                what = f"{shape}{', fp8 cache' if cached else ''}, batch {batch}, context {context}: a step"
                yield Row(what, quantity(step, "s"), quantity(least, "s"), least / step, None if cached else GOALS.get(shape))


assert set(GOALS) <= set(SHAPES)
