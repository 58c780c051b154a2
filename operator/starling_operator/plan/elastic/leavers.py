"""Pods that no size of their group needs: they go when nobody is streamed to through them, or has been for too long."""

from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.clock import read_time
from starling_operator.plan.elastic.step import ElasticTurn
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod


def are_streaming(group: Group, nodes: int) -> bool:
    """Through any of the live pods beyond so many."""
    return any(_is_streaming(pod) for pod in _leavers(group, nodes))


def drain_left(group: Group, nodes: int, operation: OperationStatus, turn: ElasticTurn) -> float:
    """Seconds that they may still take. One that runs and has not reported may have streams too."""
    leavers = _leavers(group, nodes)
    if not any(_is_streaming(pod) or (pod.report is None and pod.phase == "Running") for pod in leavers):
        return 0.0
    return read_time(operation.since) + turn.drain.accept_seconds + turn.drain.seconds - turn.now


def _leavers(group: Group, nodes: int) -> tuple[Pod, ...]:
    return tuple(pod for pod in group.live if pod.number >= nodes)


def _is_streaming(pod: Pod) -> bool:
    return pod.report is not None and pod.report.open_streams > 0
