"""How long a call takes on the device, and what the device can do at most."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bench.gpu.roofline import Limits

Call = Callable[[], object]

ROUNDS = 15
ROUND_SECONDS = 4e-3
"""Long enough for events, whose clock ticks every half microsecond, and for what one launch of a graph costs."""
MOST_COPIES = 64
"""Of all calls in one graph."""
MOST_SETS = 512


class Clock(Protocol):
    """Seconds of one of `calls`, which do the same with data of their own: so that no cache holds what the next one reads."""

    device: torch.device

    def __call__(self, calls: Sequence[Call]) -> float: ...

    def sets(self, size: int) -> int:
        """How many sets of data of `size` bytes are more than the caches hold."""
        ...


class GraphClock:
    """Replays a CUDA graph of the calls, so that neither launching nor Python is in the figure; the median of ROUNDS.

    What cannot be captured cannot be timed: it raises what torch says of it.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self._cache: int = torch.cuda.get_device_properties(self.device).L2_cache_size

    def sets(self, size: int) -> int:
        return min(MOST_SETS, math.ceil(4 * self._cache / max(size, 1)))

    def __call__(self, calls: Sequence[Call]) -> float:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles, and lets libraries take their workspaces
                call()
            once = _elapsed(calls[0])  # with what it costs to launch: there may be room for more
            copies = max(1, min(MOST_COPIES, math.ceil(ROUND_SECONDS / len(calls) / once)))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for call in [*calls] * copies:
                    call()
            graph.replay()
            turns = math.ceil(ROUND_SECONDS / _elapsed(graph.replay))

            def replay() -> None:
                for _ in range(turns):
                    graph.replay()

            rounds = [_elapsed(replay) for _ in range(ROUNDS)]
        torch.cuda.synchronize()
        return statistics.median(rounds) / (len(calls) * copies * turns)


def _elapsed(call: Call) -> float:
    """Seconds by the device's events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class HostClock:
    """For a machine without a GPU, where it only shows that what is timed runs."""

    device = torch.device("cpu")

    def sets(self, size: int) -> int:  # noqa: ARG002 - one will do
        return 1

    def __call__(self, calls: Sequence[Call]) -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) / len(calls)


def make_clock(*, toy: bool) -> Clock:
    return HostClock() if toy else GraphClock()


def measure_limits(clock: Clock) -> Limits:
    """A copy of 2 GiB, by torch's copy or by a kernel, whichever is faster; bf16 products of 8192 x 8192 random numbers, for zeros
    would multiply faster."""
    toy = clock.device.type == "cpu"
    elements, side = (1 << 20, 128) if toy else (1 << 30, 8192)
    source = torch.randn(elements, dtype=torch.bfloat16, device=clock.device)
    target = torch.empty_like(source)
    copy = min(clock([lambda: target.copy_(source)]), clock([lambda: torch.neg(source, out=target)]))
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=clock.device) for _ in range(2))
    product = clock([lambda: torch.mm(a, b)])
    return Limits(bandwidth=2 * source.nbytes / copy, rate=2 * side**3 / product)
