"""Time of a group's last progress. A group without progress for too long is reported as stalled, whatever it waits for."""

from collections.abc import Iterable

from starling_agent.contract.report import PHASES, Progress
from starling_crds.v1alpha1.status import GroupNode, GroupStatus

from starling_operator.plan.observed import Pod
from starling_operator.plan.timestamps import read_time


def last_progress(previous: GroupStatus | None, pods: Iterable[Pod], now: float) -> float:
    """Returns seconds since the epoch: now, if a pod is further than in the last status, or the group was ready or is new."""
    if previous is None or not previous.progressed_at or previous.ready:
        return now
    known = {node.pod: node for node in previous.nodes}
    if known and any(_is_further(pod, known.get(pod.name)) for pod in pods if pod.deleted_at is None):
        return now
    return read_time(previous.progressed_at)


def progress_text(progress: Progress | None) -> str:
    """Formats progress as 3.2/7.6 GB, or 12/300 tensors."""
    if progress is None or progress.total <= 0:
        return ""
    if progress.unit != "bytes":
        return f"{progress.done}/{progress.total} {progress.unit}"
    unit, factor = next(pair for pair in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)) if progress.total >= pair[1])
    return f"{progress.done / factor:.1f}/{progress.total / factor:.1f} {unit}"


def _is_further(pod: Pod, known: GroupNode | None) -> bool:
    """True if the pod got a node, or its agent reached a phase or a part of one. A pod that was recreated is no further."""
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
