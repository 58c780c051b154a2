"""Finds a group's failures in its pods, their reports and its last status: rules for single pods first, then for the gang."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.readiness import pod_message

_BROKEN_REASONS = ("CrashLoopBackOff", "ErrImageNeverPull", "InvalidImageName")
"""Waiting reasons of a container that does not start by itself."""
_TRANSIENT_REASONS = ("ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
"""Waiting reasons that the kubelet retries and that often clear up: a registry is unreachable, a Secret does not exist yet."""
_STALLED_AFTER_RESTARTS = 2
"""Restarts after which a group that never served counts as broken even while it starts. Otherwise Stalled would flap."""
_CRASH_LOOP_RESTARTS = 3
"""Restarts after which a container that is not ready counts as in a crash loop, even while it briefly runs."""
_RETURN_SECONDS = 30.0
"""Seconds for which an old group that served is waited for. Its probes fail for less where a node is only busy."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`cause`: the pod and what happened. `pods`: pods to recreate; empty if the kubelet restarted the container in place."""

    cause: str
    pods: tuple[Pod, ...]


def find_failure(group: Group, silent_after: float) -> Failure | None:
    """Returns the first failure that a restart can fix. A pod that is not scheduled yet, or still loads, has not failed."""
    found = next(_pod_failures(group, silent_after), None)
    return found if found is not None else next(_gang_failures(group), None)


def broken_cause(group: Group) -> str:
    """Returns why the group will not come up by itself; "" if it still may."""
    cause = next((pod_message(pod) for pod in group.gang_pods if _is_broken(pod, group.deadline_exceeded)), "")
    if cause or group.available or has_served(group) or restart_count(group) < _STALLED_AFTER_RESTARTS:
        return cause
    return f"{group.name}: was restarted {restart_count(group)} times and never served"


def restart_count(group: Group) -> int:
    """Restarts within the restart window, from the last status."""
    return group.previous.restarts if group.previous is not None else 0


def has_served(group: Group) -> bool:
    """True if the group has ever generated a token. From then on, no failure is blamed on its revision."""
    known = group.previous is not None and group.previous.served
    return known or any(pod.report is not None and pod.report.token_seen for pod in group.remaining_pods)


def seconds_to_return(group: Group, now: float) -> float:
    """Returns for how long a group that is not ready may still be waited for, though it is old: it served a moment ago.

    Infinite while some of its pods serve on without the others; 0 once nothing speaks for it.
    """
    if not group.drains_as_one and any(pod.ready for pod in group.needed_pods):
        return math.inf
    if not has_served(group) or len(group.needed_pods) != group.needed_nodes:
        return 0.0
    since = min((pod.unready_since for pod in group.needed_pods if pod.unready_since is not None), default=now)
    return max(0.0, since + _RETURN_SECONDS - now)


def silence_limit(progress_timeout: float) -> float:
    """Seconds without an answer after which an agent counts as gone: 60 or more, since a long poll may last a minute."""
    return max(60.0, 3 * progress_timeout)


def _pod_failures(group: Group, silent_after: float) -> Iterator[Failure]:
    """Failures of a pod, or of an agent that may succeed when restarted. They count even if the group has never served."""
    for pod in _all_gang_pods(group):
        # A lost pod of a group that is not a gang is only deleted: see `deleted_pods`.
        if pod.lost and group.nodes > 1 and group.is_gang:
            yield Failure(f"{pod.name}: its node {pod.cluster_node or '(unknown)'} is gone", group.remaining_pods)
        elif pod.deleted_at is None and not pod.drains and (pod.phase in ("Failed", "Succeeded") or _may_recover(pod)):
            yield Failure(pod_message(pod), _restart_set(group, pod))
    for pod in group.remaining_pods:
        if pod.number >= group.gang_size and _may_recover(pod):
            yield Failure(pod_message(pod), (pod,))
    if has_served(group):
        yield from _failures_in_service(group, silent_after)


def _failures_in_service(group: Group, silent_after: float) -> Iterator[Failure]:
    """Failures of a group that has served. Until then, the kubelet's restarts are enough: its agents can still form the group."""
    for pod in group.gang_pods:
        if _gave_up(pod):
            yield Failure(pod_message(pod), _restart_set(group, pod))
        elif _silent(pod, silent_after) and not (group.is_to_sleep and group.is_asleep):
            # One that sleeps is never ready: until it is needed, the kubelet alone says whether its agent lives.
            cause = f"{pod.name}: its agent has not answered for {silent_after:.0f} s and its probes fail"
            yield Failure(cause, _restart_set(group, pod))
        elif restarted_in_place(group, pod):
            yield Failure(_restart_message(pod), group.remaining_pods if group.nodes > 1 and group.is_gang else ())


def _gang_failures(group: Group) -> Iterator[Failure]:
    """Failures of a gang that lost a pod: a new pod's ranks cannot join an engine that is running."""
    if not group.is_gang:
        return
    remaining = group.remaining_pods
    for pod in _all_gang_pods(group):
        older = tuple(peer for peer in remaining if peer.created_at < pod.deleted_at) if pod.deleted_at is not None else ()
        if older:
            yield Failure(f"{pod.name}: was deleted while the rest of its group runs", older)
    listed = [node for node in group.previous.nodes if node.number < group.gang_size] if group.previous is not None else []
    present, known = {pod.uid for pod in group.pods}, {node.uid for node in listed}
    gone = [node for node in listed if node.uid and node.uid not in present]
    survivors = tuple(pod for pod in remaining if pod.uid in known)
    if len(listed) == group.gang_size and gone and survivors:
        yield Failure(f"{gone[0].pod}: was replaced while the rest of its group runs", survivors)


def _restart_set(group: Group, pod: Pod) -> tuple[Pod, ...]:
    """Pods that are restarted together with this one: all remaining pods of a gang, else this pod alone."""
    return group.remaining_pods if group.is_gang else (pod,)


def restarted_in_place(group: Group, pod: Pod) -> bool:
    """True if a container of the pod was restarted since the last status was written; False if that lists no pods from it on."""
    if group.previous is None or all(node.number < pod.number for node in group.previous.nodes):
        return False
    seen = {node.uid: node.restarts for node in group.previous.nodes}
    return pod.restarts > seen.get(pod.uid, 0)


def _all_gang_pods(group: Group) -> tuple[Pod, ...]:
    """Pods of the gang, including those being deleted (unlike `gang_pods`), but not pods that are joining or have left it."""
    return tuple(pod for pod in group.pods if pod.number < group.gang_size)


def _may_recover(pod: Pod) -> bool:
    """True if its agent has failed but may succeed in a new pod. It stays in phase `failed`, so that its message can be read."""
    return pod.report is not None and pod.report.phase == "failed" and not pod.report.fatal


def _gave_up(pod: Pod) -> bool:
    """True if its agent reports that it gave up. An agent that restarts its engine in place has not."""
    report = pod.report
    return report is not None and (report.fatal or (report.phase == "serving" and not report.healthy))


def _silent(pod: Pod, after: float) -> bool:
    """True if its agent does not answer and its probes fail. A Ready pod is healthy even if the operator cannot reach it."""
    return pod.phase == "Running" and not pod.ready and pod.report_age is not None and pod.report_age > after


def _is_broken(pod: Pod, deadline_exceeded: bool) -> bool:
    """True if the pod does not come up by itself. A transient reason counts once the progress deadline is exceeded."""
    report = pod.report
    if report is not None and (report.fatal or report.phase == "failed"):
        return True
    reasons = (*_BROKEN_REASONS, *_TRANSIENT_REASONS) if deadline_exceeded else _BROKEN_REASONS
    return pod.waiting.startswith(reasons) or (pod.restarts >= _CRASH_LOOP_RESTARTS and not pod.ready)


def _restart_message(pod: Pod) -> str:
    reason = pod.termination_message or pod.waiting
    return f"{pod.name}: container agent was restarted" + (f": {reason}" if reason else "")
