"""Time of a group's last progress. A group without progress for too long is reported as stalled, whatever it waits for."""

import re
from collections.abc import Iterable

from starling_agent.contract.report import PHASES, Progress
from starling_crds.v1alpha1.status import GroupStatus

from starling_operator.plan.observed import Pod
from starling_operator.plan.timestamps import read_time

_MARK = re.compile(r"(\d+)/(\d+)")


def last_progress(previous: GroupStatus | None, pods: Iterable[Pod], now: float) -> float:
    """Returns seconds since the epoch: now, if the pods are further than in the last status, or the group was ready or is new."""
    if previous is None or not previous.progressed_at or previous.ready:
        return now
    before = _MARK.fullmatch(previous.progress)
    if before is not None and _reached(pods) > (int(before[1]), int(before[2])):
        return now
    return read_time(previous.progressed_at)


def progress_mark(pods: Iterable[Pod]) -> str:
    """Returns what the next decision compares with. One mark stands for all pods: the status has not room for each of many."""
    return "{}/{}".format(*_reached(pods))


def progress_text(progress: Progress | None) -> str:
    """Formats progress as 3.2/7.6 GB, or 12/300 tensors."""
    if progress is None or progress.total <= 0:
        return ""
    if progress.unit != "bytes":
        return f"{progress.done}/{progress.total} {progress.unit}"
    unit, factor = _unit(progress)
    return f"{progress.done / factor:.1f}/{progress.total / factor:.1f} {unit}"


def _unit(progress: Progress) -> tuple[str, float]:
    return next(pair for pair in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)) if progress.total >= pair[1])


def _reached(pods: Iterable[Pod]) -> tuple[int, int]:
    """Returns the sums of the pods' steps, and of their parts of these. A pod that is recreated takes its own away again."""
    present = [pod for pod in pods if pod.deleted_at is None and not pod.lost]
    return sum(_steps(pod) for pod in present), sum(_parts(pod) for pod in present)


def _steps(pod: Pod) -> int:
    """Counts a node, an agent that answers, and its phases. One that failed, or begins again, has none of these."""
    if not pod.scheduled:
        return 0
    if pod.report is None:
        return 1
    return 2 if pod.report.phase in ("failed", "restarting") else 2 + PHASES.index(pod.report.phase)


def _parts(pod: Pod) -> int:
    """Counts what `progress_text` shows: tenths of a unit of bytes, else what is counted."""
    progress = pod.report.progress if pod.report is not None else None
    if progress is None or progress.total <= 0:
        return 0
    return round(10 * progress.done / _unit(progress)[1]) if progress.unit == "bytes" else progress.done
