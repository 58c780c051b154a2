"""Recovery of a gang: which pods are made anew, when, and when to give up."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from starling_crds.v1alpha1.lifecycle import RecoverySpec
from starling_crds.v1alpha1.status import GroupNode

from starling_operator.plan.decision import Delete
from starling_operator.plan.failure import broken, find_failure, has_served, silence_limit
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod

FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0
_GRACE_SECONDS = 10
"""Of a failed group's pods: no stream of a broken gang can go on, but logs and files may be finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """What is done about a failure.

    delete      pods to delete now, so that their StatefulSet makes them anew
    counted     a restart happened or is made now
    wait        seconds until the restart may be made; 0: none is due
    drains      nothing failed: the pods get all the time that they have for their streams
    exhausted   the budget is used up: the group is left alone
    """

    cause: str
    delete: tuple[Pod, ...] = ()
    counted: bool = False
    wait: float = 0.0
    drains: bool = False
    exhausted: bool = False


def heal_groups(groups: Iterable[Group], recovery: RecoverySpec, now: float) -> dict[str, RecoveryDecision]:
    """By name, those of the groups that failed."""
    found = {group.name: heal(group, recovery, now) for group in groups}
    return {name: healing for name, healing in found.items() if healing is not None}


def heal(group: Group, recovery: RecoverySpec, now: float) -> RecoveryDecision | None:
    """None: nothing failed that a restart could heal."""
    if group.going:
        return drained(group)
    times = restart_times(group, recovery, now)
    spent = len(times) >= recovery.restart_budget
    failure = find_failure(group, silence_limit(recovery.progress_timeout_seconds))
    if failure is None:
        cause = broken(group) if spent and has_served(group) else ""
        return RecoveryDecision(cause=cause, exhausted=True) if cause else None
    if not failure.gang:
        return RecoveryDecision(cause=failure.cause, counted=True)
    if spent:
        return RecoveryDecision(cause=failure.cause, exhausted=True)
    wait = _backoff_left(times, now)
    if wait > 0:
        return RecoveryDecision(cause=failure.cause, wait=wait)
    return RecoveryDecision(cause=failure.cause, delete=failure.gang, counted=True)


def drained(group: Group) -> RecoveryDecision | None:
    """A pod that is taken away on purpose takes the others along. That is no failure, and costs no restart."""
    members = group.members if group.going else ()
    return RecoveryDecision(cause="a pod of it is taken away", delete=members, drains=True) if members else None


def restart_times(group: Group, recovery: RecoverySpec, now: float) -> list[float]:
    """Restarts within the window, oldest first."""
    known = group.previous.restarted_at if group.previous is not None else []
    times = sorted(datetime.fromisoformat(text).timestamp() for text in known)
    return [time for time in times if now - time < recovery.window_seconds]


def backoff(restarts: int) -> float:
    """Seconds between the last of so many restarts and the next: 0, 10, 20, 40, ... 300."""
    return 0.0 if restarts == 0 else min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(restarts - 1, 10))


def deletions(healing: RecoveryDecision) -> tuple[Delete, ...]:
    return tuple(
        Delete("Pod", pod.name, pod.uid, None if healing.drains else _GRACE_SECONDS, f"its group restarts: {healing.cause}")
        for pod in healing.delete
    )


def released(pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Pods whose node is gone hold their name until somebody says that they will not come back. Never a matter of budget."""
    return tuple(Delete("Pod", pod.name, pod.uid, grace_seconds=0, why="its node is gone") for pod in pods if pod.lost)


def mended(pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Pods without their labels get no requests. They drain what they have."""
    found = (pod for pod in pods if pod.unlabelled and pod.deleted_at is None)
    return tuple(Delete("Pod", pod.name, pod.uid, why="it lost its labels, and another is made with them") for pod in found)


def recalled(groups: Iterable[Group], healings: Mapping[str, RecoveryDecision]) -> tuple[Delete, ...]:
    """Pods that nobody sees any more while nothing else has their name: without its labels no policy protects a pod.

    One that is truly gone costs a request in vain. While a restart waits for its time the record stays: it was asked for before.
    """
    why = "nobody sees it any more: it may have lost its labels"
    kept = (group for group in groups if group.previous is not None and not _waits(healings.get(group.name)))
    return tuple(Delete("Pod", node.pod, node.uid, why=why) for group in kept for node in _unseen(group))


def _unseen(group: Group) -> Iterator[GroupNode]:
    present, missing = {pod.uid for pod in group.pods}, group.missing
    record = group.previous.nodes if group.previous is not None else ()
    return (node for node in record if node.uid and node.uid not in present and node.pod in missing)


def _waits(healing: RecoveryDecision | None) -> bool:
    return healing is not None and healing.wait > 0


def _backoff_left(times: list[float], now: float) -> float:
    return max(0.0, times[-1] + backoff(len(times)) - now) if times else 0.0
