"""When a group last came further. What waits for the same thing for too long is told as stalled, whatever it is."""

from collections.abc import Iterable

from starling_agent.contract.report import PHASES, Progress
from starling_crds.v1alpha1.status import GroupNode, GroupStatus

from starling_operator.plan.clock import read_time
from starling_operator.plan.observed import Pod


def progressed(previous: GroupStatus | None, pods: Iterable[Pod], now: float) -> float:
    """Seconds since the epoch: now, if one of its pods shows more than the last status did, or the group is ready or new."""
    if previous is None or not previous.progressed_at or previous.ready:
        return now
    known = {node.pod: node for node in previous.nodes}
    if known and any(_is_further(pod, known.get(pod.name)) for pod in pods if pod.deleted_at is None):
        return now
    return read_time(previous.progressed_at)


def progress_text(progress: Progress | None) -> str:
    """3.2/7.6 GB, or 12/300 tensors."""
    if progress is None or progress.total <= 0:
        return ""
    if progress.unit != "bytes":
        return f"{progress.done}/{progress.total} {progress.unit}"
    unit, factor = next(pair for pair in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)) if progress.total >= pair[1])
    return f"{progress.done / factor:.1f}/{progress.total / factor:.1f} {unit}"


def _is_further(pod: Pod, known: GroupNode | None) -> bool:
    """A pod that was placed, an agent that reached a phase or a part of one. A pod made anew has come no further."""
    if known is None:
        return pod.scheduled
    if pod.scheduled and not known.host:
        return True
    report = pod.report
    if report is None or report.phase in ("failed", "restarting"):
        return False
    before = PHASES.index(known.phase) if known.phase in PHASES else -1
    now = PHASES.index(report.phase)
    return now > before or (now == before and progress_text(report.progress) != known.progress)
