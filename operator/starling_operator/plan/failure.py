"""Failures of a group, by its pods, their agents' reports and its record. Rules of one pod come first, then those of a gang."""

from collections.abc import Iterator
from dataclasses import dataclass

from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.readiness import pod_message

_HOPELESS = ("CrashLoopBackOff", "ErrImageNeverPull", "InvalidImageName")
_PASSING = ("ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
"""Reasons of failures that a kubelet tries again, and that often pass: a registry is away, a Secret does not exist yet."""
_VAIN_RESTARTS = 2
"""Restarts after which a group that never served counts as broken even while it starts. Else Stalled would come and go."""
_CRASHES = 3
"""Restarts after which a container that is not ready counts as in a crash loop, even while it runs for a moment."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`cause`: the pod and what happened. `pods`: pods to make again; empty if the kubelet restarted the container in place."""

    cause: str
    pods: tuple[Pod, ...]


def find_failure(group: Group, silent_after: float) -> Failure | None:
    """Returns the first failure that a restart can heal. A pod that waits for a node, or loads, has not failed."""
    found = next(_pod_failures(group, silent_after), None)
    return found if found is not None else next(_gang_failures(group), None)


def broken_cause(group: Group) -> str:
    """Returns why the group does not come up by itself; "" if it may."""
    cause = next((pod_message(pod) for pod in group.gang_pods if _hopeless(pod, group.overdue)), "")
    if cause or group.available or has_served(group) or restart_count(group) < _VAIN_RESTARTS:
        return cause
    return f"{group.name}: was restarted {restart_count(group)} times and never served"


def restart_count(group: Group) -> int:
    """Restarts within the window, from the last status."""
    return group.previous.restarts if group.previous is not None else 0


def has_served(group: Group) -> bool:
    """True if the group has ever served. From then on its revision is not the cause of a failure."""
    known = group.previous is not None and group.previous.served
    return known or any(pod.report is not None and pod.report.token_seen for pod in group.live)


def silence_limit(progress_timeout: float) -> float:
    """Returns seconds without an answer after which an agent counts as gone. A long poll is answered at least once a minute."""
    return max(60.0, 3 * progress_timeout)


def _pod_failures(group: Group, silent_after: float) -> Iterator[Failure]:
    """Failures of a pod, or of an agent that may succeed when started again. They count although the group never served."""
    for pod in _known_gang_pods(group):
        # A lost pod of a group that is no gang is only deleted.
        if pod.lost and group.nodes > 1 and group.is_gang:
            yield Failure(f"{pod.name}: its node {pod.host or '(unknown)'} is gone", group.live)
        elif pod.deleted_at is None and not pod.drains and (pod.phase in ("Failed", "Succeeded") or _may_try_again(pod)):
            yield Failure(pod_message(pod), _gang(group, pod))
    for pod in group.live:
        if pod.number >= group.gang_size and _may_try_again(pod):
            yield Failure(pod_message(pod), (pod,))
    if has_served(group):
        yield from _failures_in_service(group, silent_after)


def _failures_in_service(group: Group, silent_after: float) -> Iterator[Failure]:
    """Failures of a group that has served. Before that, its agents find each other again, and the kubelet's back-off is enough."""
    for pod in group.gang_pods:
        if _gave_up(pod):
            yield Failure(pod_message(pod), _gang(group, pod))
        elif _silent(pod, silent_after):
            yield Failure(f"{pod.name}: its agent has not answered for {silent_after:.0f} s and its probes fail", _gang(group, pod))
        elif restarted_in_place(group, pod):
            yield Failure(_restart_message(pod), group.live if group.nodes > 1 and group.is_gang else ())


def _gang_failures(group: Group) -> Iterator[Failure]:
    """Failures of a gang that lost a pod: a new pod's ranks cannot join an engine that is running."""
    if not group.is_gang:
        return
    for pod in _known_gang_pods(group):
        older = tuple(peer for peer in group.live if pod.deleted_at is not None and peer.created_at < pod.deleted_at)
        if older:
            yield Failure(f"{pod.name}: was deleted while the rest of its group runs", older)
    record = [node for node in group.previous.nodes if node.number < group.gang_size] if group.previous is not None else []
    present = {pod.uid for pod in group.pods}
    gone = [node for node in record if node.uid and node.uid not in present]
    survivors = tuple(pod for pod in group.live if pod.uid in {node.uid for node in record})
    if len(record) == group.gang_size and gone and survivors:
        yield Failure(f"{gone[0].pod}: was replaced while the rest of its group runs", survivors)


def _gang(group: Group, pod: Pod) -> tuple[Pod, ...]:
    """This pod and all that cannot go on without it."""
    return group.live if group.is_gang else (pod,)


def restarted_in_place(group: Group, pod: Pod) -> bool:
    """True if the pod's container was restarted since the last status. False if that has no pods of the group."""
    if group.previous is None or not group.previous.nodes:
        return False
    seen = {node.uid: node.restarts for node in group.previous.nodes}
    return pod.restarts > seen.get(pod.uid, 0)


def _known_gang_pods(group: Group) -> tuple[Pod, ...]:
    """Pods of the gang, also those that are being deleted. Pods that join it, or have left it, are not among them."""
    return tuple(pod for pod in group.pods if pod.number < group.gang_size)


def _may_try_again(pod: Pod) -> bool:
    """True if its agent has failed but may succeed in a new pod. It waits in its last phase, where its message can be read."""
    return pod.report is not None and pod.report.phase == "failed" and not pod.report.fatal


def _gave_up(pod: Pod) -> bool:
    """True if its agent reports that it gave up. An agent that restarts its engine in place has not."""
    report = pod.report
    return report is not None and (report.fatal or (report.phase == "serving" and not report.healthy))


def _silent(pod: Pod, after: float) -> bool:
    """True if its agent does not answer and its probes fail. A pod that is Ready is well, though the operator cannot reach it."""
    return pod.phase == "Running" and not pod.ready and pod.report_age is not None and pod.report_age > after


def _hopeless(pod: Pod, overdue: bool) -> bool:
    report = pod.report
    if report is not None and (report.fatal or report.phase == "failed"):
        return True
    return pod.waiting.startswith(_HOPELESS + _PASSING if overdue else _HOPELESS) or (pod.restarts >= _CRASHES and not pod.ready)


def _restart_message(pod: Pod) -> str:
    words = pod.last_log or pod.waiting
    return f"{pod.name}: container agent was restarted" + (f": {words}" if words else "")
