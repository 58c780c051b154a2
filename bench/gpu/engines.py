"""Engines with random weights, and how long they take for a batch."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from starling_engine import LLM, SamplingParams

from bench.gpu.shapes import model_folder

Prompt = dict[str, list[int]]


@contextmanager
def engine(shape: str, *, toy: bool, max_model_len: int, **arguments: Any) -> Iterator[LLM]:
    """Of the shape's weights, drawn where it starts; no prompt is found again in its cache."""
    settings = {"load_format": "dummy", "enable_prefix_caching": False, **arguments}
    with engine_of(model_folder(shape, toy=toy), toy=toy, max_model_len=max_model_len, **settings) as llm:
        yield llm


@contextmanager
def engine_of(folder: Path, *, toy: bool, **arguments: Any) -> Iterator[LLM]:
    place: dict[str, Any] = (
        {"device": "cpu", "kv_cache_memory_bytes": 64 << 20, "num_threads": 1}
        if toy
        else {"device": "cuda", "gpu_memory_utilization": 0.9}
    )
    settings = {
        "dtype": "bfloat16",
        "max_num_batched_tokens": 8192,
        "seed": 0,
        "show_progress": False,
    }
    with LLM(str(folder), **{**settings, **place, **arguments}) as llm:
        yield llm


def room(llm: LLM, tokens: int) -> int:
    """Returns how many requests of so many tokens the KV cache holds; one block is nobody's, and another may be half full."""
    memory = llm.engine.cores.memory
    return (memory.num_blocks - 1) // -(-tokens // memory.block_size)


def prompts(count: int, length: int, generator: torch.Generator) -> list[Prompt]:
    """Random tokens, so that experts and greedy outputs vary."""
    return [{"prompt_token_ids": row} for row in torch.randint(100, 3000, (count, length), generator=generator).tolist()]


def seconds(llm: LLM, batch: Sequence[Prompt], new: int) -> float:
    """Of one batch, greedy, `new` tokens each."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(list(batch), params, use_tqdm=False)
    took = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == new for output in outputs), "a request ended early"
    return took
