"""Which kernels take the time of a step: from the driver's record of each one's begin and end."""

import csv
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.busy import Span, busy_share, intervals, watch
from bench.gpu.keep import profile_file
from bench.gpu.table import Row, quantity

WINDOW = 0.4
"""Seconds."""
MOST = 15
"""Kernels that have a row; the file has all."""
NAME = 70
"""Characters of a kernel's name in a row: those of libraries are long."""


@dataclass(frozen=True)
class Use:
    """One kernel in a window: seconds in all, the runs, and seconds in which nothing ran just before them."""

    name: str
    seconds: float
    runs: int
    gaps: float


def uses(spans: Sequence[Span]) -> list[Use]:
    """Returns what each kernel takes, the one that takes most first.

    `spans` are in the order of their begin, as `busy.kernels` gives them.
    """
    found: dict[str, list[float]] = {}
    reached = spans[0].begin if spans else 0.0
    for span in spans:
        of = found.setdefault(span.name, [0.0, 0, 0.0])
        of[0] += span.end - span.begin
        of[1] += 1
        of[2] += max(0.0, span.begin - reached)
        reached = max(reached, span.end)
    return sorted((Use(name, of[0], int(of[1]), of[2]) for name, of in found.items()), key=lambda use: -use.seconds)


def profile_rows(folder: Path, what: str, work: Callable[[], object], kind: str) -> Iterator[Row]:
    """The kernels while `work` is done again and again, in an engine that was started `busy.watched` in `folder`.

    A share is of the time from the first to the last of them.
    """
    spans = _trace(folder, work, f"{what}-{kind}")
    if not spans:
        yield Row(f"{what}, {kind}: kernels", "none were traced")
        return
    found, whole = uses(spans), max(span.end for span in spans) - spans[0].begin
    _write(f"{what}, {kind}", found, whole)
    busy = busy_share(intervals(spans)) or 0.0
    yield Row(f"{what}, {kind}: kernels that ran in {quantity(whole, 's')}", str(len(spans)), share=busy)
    for use in found[:MOST]:
        gap = f"{use.runs} times, {quantity(use.gaps / use.runs, 's')} idle before"
        yield Row(f"`{_short(use.name)}`", quantity(use.seconds / use.runs, "s"), gap, use.seconds / whole)


def _trace(folder: Path, work: Callable[[], object], name: str) -> list[Span]:
    done = threading.Event()

    def go_on() -> None:
        while not done.is_set():
            work()

    worker = threading.Thread(target=go_on, daemon=True)
    worker.start()
    try:
        return watch(folder, abs(hash(name)), WINDOW)
    finally:
        done.set()
        worker.join()


def _write(what: str, found: Sequence[Use], whole: float) -> None:
    fresh = not profile_file().exists()
    with profile_file().open("a", newline="") as file:
        lines = csv.writer(file)
        if fresh:
            lines.writerow(("what", "kernel", "runs", "seconds", "idle seconds before", "share"))
        for use in found:
            lines.writerow((what, use.name, use.runs, f"{use.seconds:.9f}", f"{use.gaps:.9f}", f"{use.seconds / whole:.4f}"))


def _short(name: str) -> str:
    plain = name.replace("|", "/").replace("`", "'")
    return plain if len(plain) <= NAME else f"{plain[: NAME - 3]}..."
