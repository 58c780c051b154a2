"""Recovery of failed groups: which pods are deleted, so that they are recreated, when, and when to give up."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from starling_crds.v1alpha1.lifecycle import RecoverySpec
from starling_crds.v1alpha1.status import GroupNode

from starling_operator.plan.decision import Delete
from starling_operator.plan.failure import broken_cause, find_failure, has_served, silence_limit
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod

FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0
_GRACE_SECONDS = 10
"""Grace period of a failed group's pods: a broken gang cannot continue its streams, but logs and files may be finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """Action on a failure, or on a drain.

    delete      pods to delete now; their StatefulSet recreates them
    counted     counts against the restart budget: the kubelet restarted a container, or pods are deleted now
    wait        seconds until the restart may be made; 0: no restart waits
    drains      nothing failed: the pods get their whole grace period for their streams
    exhausted   the restart budget is used up: the group is not restarted again
    """

    cause: str
    delete: tuple[Pod, ...] = ()
    counted: bool = False
    wait: float = 0.0
    drains: bool = False
    exhausted: bool = False


def recovery_decisions(groups: Iterable[Group], recovery: RecoverySpec, now: float) -> dict[str, RecoveryDecision]:
    """Returns decisions by name, of groups that failed or drain."""
    found = {group.name: recovery_decision(group, recovery, now) for group in groups}
    return {name: decision for name, decision in found.items() if decision is not None}


def recovery_decision(group: Group, recovery: RecoverySpec, now: float) -> RecoveryDecision | None:
    """Returns None if nothing failed that a restart could fix."""
    if group.draining:
        return drain_decision(group)
    times = restart_times(group, recovery, now)
    exhausted = len(times) >= recovery.restart_budget
    failure = find_failure(group, silence_limit(recovery.progress_timeout_seconds))
    if failure is None:
        cause = broken_cause(group) if exhausted and has_served(group) else ""
        return RecoveryDecision(cause=cause, exhausted=True) if cause else None
    if not failure.pods:
        return RecoveryDecision(cause=failure.cause, counted=True)
    if exhausted:
        return RecoveryDecision(cause=failure.cause, exhausted=True)
    wait = _backoff_left(times, now)
    if wait > 0:
        return RecoveryDecision(cause=failure.cause, wait=wait)
    return RecoveryDecision(cause=failure.cause, delete=failure.pods, counted=True)


def drain_decision(group: Group) -> RecoveryDecision | None:
    """Deletes the other pods of a group of which one drains. That is no failure, and does not count against the restart budget."""
    members = group.gang_pods if group.draining else ()
    return RecoveryDecision(cause="a pod of it is being terminated", delete=members, drains=True) if members else None


def restart_times(group: Group, recovery: RecoverySpec, now: float) -> list[float]:
    """Returns times of restarts within the window, oldest first."""
    known = group.previous.restarted_at if group.previous is not None else []
    times = sorted(datetime.fromisoformat(text).timestamp() for text in known)
    return [time for time in times if now - time < recovery.window_seconds]


def backoff(restarts: int) -> float:
    """Returns seconds from the last of `restarts` restarts to the next: 0, 10, 20, 40, ... 300."""
    return 0.0 if restarts == 0 else min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(restarts - 1, 10))


def restart_deletions(decision: RecoveryDecision) -> tuple[Delete, ...]:
    return tuple(
        Delete("Pod", pod.name, pod.uid, None if decision.drains else _GRACE_SECONDS, f"its group restarts: {decision.cause}")
        for pod in decision.delete
    )


def lost_pod_deletions(pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Deletes pods on lost nodes at once. Until then their StatefulSet cannot recreate them. That is no restart of the budget."""
    return tuple(Delete("Pod", pod.name, pod.uid, grace_seconds=0, why="its node is gone") for pod in pods if pod.lost)


def unlabelled_pod_deletions(pods: Iterable[Pod]) -> tuple[Delete, ...]:
    """Deletes pods that lost a label: they get no new requests, and drain their open ones."""
    found = (pod for pod in pods if pod.unlabelled and pod.deleted_at is None)
    return tuple(Delete("Pod", pod.name, pod.uid, why="it lost its labels, and is recreated with them") for pod in found)


def unobserved_pod_deletions(groups: Iterable[Group], decisions: Mapping[str, RecoveryDecision]) -> tuple[Delete, ...]:
    """Deletes pods that the last status lists but that are not observed: they may run without their labels.

    No NetworkPolicy protects such a pod. If it is truly gone, the request does nothing. Pods whose name another pod has are left
    out. So are groups whose restart waits: their status still lists the pods that failed.
    """
    why = "it is no longer observed: it may have lost its labels"
    kept = (group for group in groups if group.previous is not None and not _waits(decisions.get(group.name)))
    return tuple(Delete("Pod", node.pod, node.uid, why=why) for group in kept for node in _unobserved(group))


def _unobserved(group: Group) -> Iterator[GroupNode]:
    present, missing = {pod.uid for pod in group.pods}, group.missing
    listed = group.previous.nodes if group.previous is not None else ()
    return (node for node in listed if node.uid and node.uid not in present and node.pod in missing)


def _waits(decision: RecoveryDecision | None) -> bool:
    return decision is not None and decision.wait > 0


def _backoff_left(times: list[float], now: float) -> float:
    return max(0.0, times[-1] + backoff(len(times)) - now) if times else 0.0
