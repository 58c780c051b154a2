"""How much of a window of time the GPU ran kernels of an engine: from the begin and end of each, as the driver traces them.

The tracing has to be in the process that launches, so `inside/sitecustomize.py` is put on the path of the engine core that is
started next, and profiles when a file asks it to. Kernels may overlap; a copy alone is not work.
"""

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

INSIDE = Path(__file__).parent / "inside"
FOLDER = "STARLING_BENCH_WATCH"
"""Environment variable: the folder in which a watched process looks for orders and leaves its traces."""
KEPT_TRACING = "TEARDOWN_CUPTI"
"""Environment variable of torch's profiler: with 0 the driver's tracing stays prepared, since to end it and to begin again where
graphs were captured has crashed in several versions."""
EDGE = 0.15
"""Share of a window that is left out on either side: there the profiler itself starts and ends."""
PATIENCE = 60.0

Interval = tuple[float, float]


class Span(NamedTuple):
    """One run of a kernel, in seconds."""

    begin: float
    end: float
    name: str


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Engine cores that are started within can be watched."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", FOLDER, KEPT_TRACING)}
    os.environ[KEPT_TRACING] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INSIDE), before["PYTHONPATH"])))
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def watch(folder: Path, number: int, seconds: float) -> list[Span]:
    """Kernels of the next so many seconds. Raises TimeoutError when no trace comes; `number` is new at each call."""
    trace, order = folder / f"trace-{number}.json", folder / f"go-{number}"
    order.write_text(str(seconds))
    end = time.monotonic() + seconds + PATIENCE
    while not trace.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no trace within {seconds + PATIENCE:.0f} s")
        time.sleep(0.05)
    return kernels(json.loads(trace.read_text()))


def kernels(trace: dict[str, Any]) -> list[Span]:
    """The kernels in a trace of torch's profiler (Chrome's format, microseconds), by their begin."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "kernel" and event.get("ph") == "X"]
    return sorted(Span(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["name"]) for event in found)


def intervals(spans: Sequence[Span]) -> list[Interval]:
    """When they ran."""
    return [(span.begin, span.end) for span in spans]


def busy_share(intervals: Sequence[Interval], bridged: float = 0.0) -> float | None:
    """Of the middle of the window in which at least one of them runs; None where there are none. Gaps of up to `bridged` seconds
    count as busy: what lies between kernels that were queued long before is no one's waiting for the host."""
    if not intervals:
        return None
    intervals = [(begin, end + bridged) for begin, end in intervals]
    first, last = intervals[0][0], max(end for _, end in intervals)
    low, high = first + EDGE * (last - first), last - EDGE * (last - first)
    busy, reached = 0.0, low
    for begin, end in intervals:
        busy += max(0.0, min(end, high) - max(begin, reached))
        reached = max(reached, min(end, high))
    return busy / (high - low)


def longest_gap(intervals: Sequence[Interval]) -> float:
    """Seconds."""
    ends = itertools.accumulate((end for _, end in intervals), max)
    return max((begin - end for (begin, _), end in zip(intervals[1:], ends, strict=False)), default=0.0)
