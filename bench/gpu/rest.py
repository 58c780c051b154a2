"""Sleep and waking up: how long they take, and how much memory others have meanwhile. Weights from files in the page cache."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from starling_engine import LLM, SamplingParams

from bench.gpu.engines import engine_of
from bench.gpu.files import write_weights
from bench.gpu.shapes import model_config, model_folder
from bench.gpu.table import Row, quantity, timed

WAKE = {("Qwen3-0.6B", 1): 1.0}
"""Seconds, by shape and level."""


def rows(*, toy: bool) -> Iterator[Row]:
    for shape in ("Qwen3-0.6B", "Llama-3-8B"):
        with tempfile.TemporaryDirectory(prefix="starling-gpu-") as root:
            folder = model_folder(shape, toy=toy, root=Path(root))
            write_weights(folder, model_config(shape, toy=toy), room=shutil.disk_usage(root).free)
            torch.cuda.empty_cache()
            before = _free(toy=toy)
            # Else the prompt is found again after the first waking, and its answer comes of sums in another order.
            settings = {"load_format": "auto", "enable_sleep_mode": True, "enable_prefix_caching": False}
            with engine_of(folder, toy=toy, max_model_len=2048, **settings) as llm:
                for level in (1, 2):
                    yield from _measure(llm, shape, level, before, toy=toy)


def _measure(llm: LLM, shape: str, level: int, before: int, *, toy: bool) -> Iterator[Row]:
    """`before`: bytes that were free before the engine came."""
    said = _say(llm)
    taken = before - _free(toy=toy)
    asleep = _seconds(lambda: llm.sleep(level))
    left = before - _free(toy=toy)
    awake = _seconds(llm.wake_up)
    if _say(llm) != said:
        raise RuntimeError(f"{shape} says something else after level {level}")
    what = f"{shape}, level {level}"
    yield Row(f"{what}: to fall asleep", quantity(asleep, "s"))
    yield Row(f"{what}: memory that it still holds", quantity(left, "B"), f"{quantity(taken, 'B')} awake")
    yield timed(f"{what}: to wake up", quantity(awake, "s"), awake, WAKE.get((shape, level)))


def _say(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(range(100, 132))}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def _seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _free(*, toy: bool) -> int:
    """Bytes, of the device."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if toy else torch.cuda.mem_get_info()[0]
