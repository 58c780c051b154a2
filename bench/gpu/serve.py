"""Many requests at once, as a server has them: output tokens a second, and whether the GPU ever waits for the host."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from starling_engine import LLM

from bench.gpu.busy import Interval, busy_share, intervals, longest_gap, watch, watched
from bench.gpu.clock import make_clock, measure_limits
from bench.gpu.engines import engine, prompts, room, seconds
from bench.gpu.roofline import serve_seconds
from bench.gpu.shapes import model_config
from bench.gpu.table import Row, quantity

SHAPE, REQUESTS, PROMPT, NEW = "Llama-3-8B", 256, 1000, 1000
WINDOW, GOAL = 2.0, 0.97
BRIDGED = 2e-6


class Watcher(threading.Thread):
    """Looks at two windows of a batch that another thread runs: while prompts are read, and once all requests decode."""

    def __init__(self, llm: LLM, folder: Path, prompt_tokens: int, window: float) -> None:
        """`prompt_tokens` of the whole batch: counted when a request gets its first token."""
        super().__init__(daemon=True)
        self.seen: dict[str, list[Interval]] = {}
        self.error: BaseException | None = None
        self._llm, self._folder, self._tokens, self._window = llm, folder, prompt_tokens, window
        self._answered = llm.engine.stats.prompt_tokens_total

    def run(self) -> None:
        try:
            self._wait(lambda: self._llm.engine.stats.running > 0)
            self.seen["while prompts are read"] = intervals(watch(self._folder, 1, self._window))
            self._wait(lambda: self._llm.engine.stats.prompt_tokens_total - self._answered >= self._tokens)
            self.seen["while all decode"] = intervals(watch(self._folder, 2, self._window))
        except BaseException as error:  # noqa: BLE001 - for whoever joins it
            self.error = error

    def _wait(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not happened():
            if time.monotonic() > end:
                raise TimeoutError("the requests that were to be watched did not come so far")
            time.sleep(0.02)


def rows(*, toy: bool) -> Iterator[Row]:
    limits = measure_limits(make_clock(toy=toy))
    torch.cuda.empty_cache()
    requests, prompt, new, window = (8, 32, 400, 0.3) if toy else (REQUESTS, PROMPT, NEW, WINDOW)
    most = requests
    random = torch.Generator().manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as name,
        watched(folder := Path(name)),
        engine(SHAPE, toy=toy, max_model_len=prompt + new, max_num_seqs=most) as llm,
    ):
        # So many that none has to wait for another's memory.
        requests = min(most, room(llm, prompt + new))
        tokens, what = requests * new, f"{SHAPE}, {requests} at once, {prompt} in, {new} out"
        least = serve_seconds(model_config(SHAPE, toy=toy), limits, requests, prompt, new)
        seconds(llm, prompts(requests, 16, random), 4)
        took = seconds(llm, prompts(requests, prompt, random), new)
        yield Row(f"{what}: output tokens/s", f"{tokens / took:,.0f}", f"{tokens / least:,.0f}", least / took)
        watcher = Watcher(llm, folder, requests * prompt, window)
        watcher.start()
        slowed = seconds(llm, prompts(requests, prompt, random), new)
        yield Row("the same while kernels are traced in two windows", f"{tokens / slowed:,.0f}")
        watcher.join()
    yield from _busy(watcher, toy=toy)


def _busy(watcher: Watcher, *, toy: bool) -> Iterator[Row]:
    """Raises what kept the watcher from seeing kernels."""
    for when, kernels in watcher.seen.items():
        share = busy_share(kernels)
        if share is not None:
            gap = quantity(longest_gap(kernels), "s")
            yield Row(f"GPU busy {when} ({len(kernels)} kernels, longest gap {gap})", f"{share:.1%}", "100 %", share, GOAL)
            bridged = busy_share(kernels, BRIDGED)
            yield Row(f"the same without gaps of up to {quantity(BRIDGED, 's')}, of which tracing makes some", f"{bridged:.1%}")
    if watcher.error is not None:
        raise watcher.error
    if not toy and not all(watcher.seen.values()):
        raise RuntimeError("the engine's process told of no kernels")
