"""How a group fails: what its pods, their agents and its own record show. Rules of one pod first, then those of a gang."""

from collections.abc import Iterator
from dataclasses import dataclass

from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.proof import pod_message

_HOPELESS = ("CrashLoopBackOff", "ErrImageNeverPull", "InvalidImageName")
_PASSING = ("ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
"""What a kubelet tries again, and what heals by itself as often as not: a registry that is away, a Secret that is yet to come."""
_VAIN_RESTARTS = 2
"""A group that was restarted so often and never served counts as broken also while it starts: it would seem to come and go."""
_CRASHES = 3
"""A container that was restarted so often and is not ready is in a crash loop, also while it runs for a moment."""


@dataclass(frozen=True, slots=True)
class Failure:
    """cause: the pod, and what happened in words. gang: pods that have to be made anew; empty where the kubelet did it in place."""

    cause: str
    gang: tuple[Pod, ...]


def find_failure(group: Group, silent_after: float) -> Failure | None:
    """The first failure that a restart can heal. A pod that waits for a node, or loads, has not failed."""
    found = next(_pod_failures(group, silent_after), None)
    return found if found is not None else next(_gang_failures(group), None)


def broken(group: Group) -> str:
    """Why the group does not come up by itself; "" if it may, as far as one sees."""
    cause = next((pod_message(pod) for pod in group.members if _hopeless(pod, group.overdue)), "")
    if cause or group.available or has_served(group) or restarts(group) < _VAIN_RESTARTS:
        return cause
    return f"{group.name}: was restarted {restarts(group)} times and never served"


def restarts(group: Group) -> int:
    """Within the window, as the last status counted them."""
    return group.previous.restarts if group.previous is not None else 0


def has_served(group: Group) -> bool:
    """Once, in its life: from then on a failure is not the revision's."""
    known = group.previous is not None and group.previous.served
    return known or any(pod.report is not None and pod.report.token_seen for pod in group.live)


def silence_limit(progress_timeout: float) -> float:
    """Seconds without an answer after which an agent counts as gone; its long poll answers at least once a minute."""
    return max(60.0, 3 * progress_timeout)


def _pod_failures(group: Group, silent_after: float) -> Iterator[Failure]:
    """Those that need no life before: of a pod, or of an agent that could not go on but might another time."""
    for pod in _members(group):
        # A pod that nobody needs has only to be let go when it is lost.
        if pod.lost and group.nodes > 1 and group.tied:
            yield Failure(f"{pod.name}: its node {pod.host or '(unknown)'} is gone", group.live)
        elif pod.deleted_at is None and not pod.drains and (pod.phase in ("Failed", "Succeeded") or _may_try_again(pod)):
            yield Failure(pod_message(pod), _gang(group, pod))
    for pod in group.live:
        if pod.number >= group.gang and _may_try_again(pod):
            yield Failure(pod_message(pod), (pod,))
    if has_served(group):
        yield from _failures_in_service(group, silent_after)


def _failures_in_service(group: Group, silent_after: float) -> Iterator[Failure]:
    """Before a group served, its agents find each other again by themselves, and the kubelet's back-off is enough."""
    for pod in group.members:
        if _gave_up(pod):
            yield Failure(pod_message(pod), _gang(group, pod))
        elif _silent(pod, silent_after):
            yield Failure(f"{pod.name}: its agent has not answered for {silent_after:.0f} s and its probes fail", _gang(group, pod))
        elif restarted_in_place(group, pod):
            yield Failure(_restart_message(pod), group.live if group.nodes > 1 and group.tied else ())


def _gang_failures(group: Group) -> Iterator[Failure]:
    """A member that went takes the others with it: its rank cannot join an engine that is running."""
    if not group.tied:
        return
    for pod in _members(group):
        older = tuple(peer for peer in group.live if pod.deleted_at is not None and peer.created_at < pod.deleted_at)
        if older:
            yield Failure(f"{pod.name}: was deleted while the rest of its group runs", older)
    record = [node for node in group.previous.nodes if node.number < group.gang] if group.previous is not None else []
    present = {pod.uid for pod in group.pods}
    gone = [node for node in record if node.uid and node.uid not in present]
    survivors = tuple(pod for pod in group.live if pod.uid in {node.uid for node in record})
    if len(record) == group.gang and gone and survivors:
        yield Failure(f"{gone[0].pod}: was replaced while the rest of its group runs", survivors)


def _gang(group: Group, pod: Pod) -> tuple[Pod, ...]:
    """The pods that cannot go on without this one, with itself."""
    return group.live if group.tied else (pod,)


def restarted_in_place(group: Group, pod: Pod) -> bool:
    """Its container was restarted since the last status. Without a last status, or one that names its pods, nobody knows."""
    if group.previous is None or not group.previous.nodes:
        return False
    seen = {node.uid: node.restarts for node in group.previous.nodes}
    return pod.restarts > seen.get(pod.uid, 0)


def _members(group: Group) -> tuple[Pod, ...]:
    """Those that go too, but neither pods that join or have left the gang, nor such as a smaller StatefulSet takes away."""
    return tuple(pod for pod in group.pods if pod.number < group.gang)


def _may_try_again(pod: Pod) -> bool:
    """Its agent waits in its last phase, where its words can be read, for somebody to make its pod anew."""
    return pod.report is not None and pod.report.phase == "failed" and not pod.report.fatal


def _gave_up(pod: Pod) -> bool:
    """Its agent says so. While it restarts its engine in place, it has not."""
    report = pod.report
    return report is not None and (report.fatal or (report.phase == "serving" and not report.healthy))


def _silent(pod: Pod, after: float) -> bool:
    """A pod whose probes succeed is well, whatever keeps the operator from reaching it."""
    return pod.phase == "Running" and not pod.ready and pod.report_age is not None and pod.report_age > after


def _hopeless(pod: Pod, overdue: bool) -> bool:
    report = pod.report
    if report is not None and (report.fatal or report.phase == "failed"):
        return True
    return pod.waiting.startswith(_HOPELESS + _PASSING if overdue else _HOPELESS) or (pod.restarts >= _CRASHES and not pod.ready)


def _restart_message(pod: Pod) -> str:
    words = pod.last_log or pod.waiting
    return f"{pod.name}: container agent was restarted" + (f": {words}" if words else "")
