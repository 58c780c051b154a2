"""How near a long prompt comes to the device's matrix rate: from the call to the first token, everything between them included."""

import statistics
from collections.abc import Iterator

import torch

from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.engines import engine, prompts, seconds
from bench.gpu.roofline import StepRow, step_cost
from bench.gpu.shapes import model_config
from bench.gpu.table import Row, quantity

SHAPE, TOKENS, TRIES, GOAL = "Llama-3-8B", 8192, 7, 0.7


def rows(*, toy: bool) -> Iterator[Row]:
    limits = measure_limits(make_clock(toy=toy))
    torch.cuda.empty_cache()
    tokens, random = (64, torch.Generator()) if toy else (TOKENS, torch.Generator())
    cost = step_cost(model_config(SHAPE, toy=toy), [StepRow(tokens, tokens)])
    with engine(SHAPE, toy=toy, max_model_len=tokens + 16, max_num_batched_tokens=max(tokens, 256)) as llm:
        seconds(llm, prompts(1, tokens, random), 1)
        took = statistics.median(seconds(llm, prompts(1, tokens, random), 1) for _ in range(TRIES))
    rate = cost.flops / took
    yield Row(f"{SHAPE}, 1 x {tokens} tokens: time to the first token", quantity(took, "s"), quantity(limits.seconds(cost), "s"))
    yield Row("its products and attention", quantity(rate, "FLOP/s"), quantity(limits.rate, "FLOP/s"), rate / limits.rate, GOAL)
