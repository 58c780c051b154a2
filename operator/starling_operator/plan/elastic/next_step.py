"""The next step of one live group towards the size that is wanted: at most one thing is done at a time.

    more pods -> the operation is stored in the status -> the leader is told -> it is followed -> pods that left go

A step that was cut short is decided again from what is there: the leader is told only what the status holds, by an id that it knows
again, and an answer that did not come is asked for by telling it the same.
"""

from dataclasses import replace

from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.clock import read_time
from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.elastic.elastic_state import ElasticState, ended
from starling_operator.plan.elastic.following import follow, phased, serial
from starling_operator.plan.elastic.leavers import are_streaming, drain_left
from starling_operator.plan.elastic.pauses import held_back
from starling_operator.plan.elastic.step import ElasticStep, ElasticTurn
from starling_operator.plan.group import Group


def next_step(group: Group, turn: ElasticTurn) -> ElasticStep:
    """Of a group that is elastic."""
    sizing = group.sizing
    assert sizing is not None
    if sizing.leader is None:
        return ElasticStep(nodes=_at_least(group, sizing.gang or 1), operation=sizing.stored, waits="its leader has not reported")
    answer = turn.answers.get(sizing.stored.id) if sizing.stored is not None else None
    operation = follow(sizing, answer, closed=_is_closed(group, sizing, turn), now=turn.now)
    if operation is not None and not ended(operation):
        return _running(group, sizing, operation, turn)
    return _resting(group, sizing, operation, turn)


def _is_closed(group: Group, sizing: ElasticState, turn: ElasticTurn) -> bool:
    """Of an operation that the leader calls done: leavers are gone, and new pods serve, unless another size is wanted by now."""
    told = sizing.leader.operation if sizing.leader is not None else None
    if told is None or group.nodes > sizing.nodes(told.target):
        return False
    return turn.whole or turn.desired != told.target


def _running(group: Group, sizing: ElasticState, operation: OperationStatus, turn: ElasticTurn) -> ElasticStep:
    assert sizing.leader is not None
    told = sizing.leader.operation
    known = told is not None and told.id == operation.id
    is_stored = sizing.stored is not None and sizing.stored.id == operation.id
    step = ElasticStep(nodes=_at_least(group, sizing.gang or 1), operation=operation)
    if known and told is not None and told.phase in ("committing", "releasing", "done"):
        return _release(group, sizing, step, turn) if told.phase == "done" else step
    if turn.desired not in (None, operation.target.data):
        return replace(step, call=_call(group, operation, None)) if is_stored else step
    needed = _at_least(group, sizing.nodes(operation.target.data))
    if known or not is_stored or needed > group.nodes:
        return replace(step, nodes=needed)
    return replace(step, call=_call(group, operation, operation.target.data))


def _release(group: Group, sizing: ElasticState, step: ElasticStep, turn: ElasticTurn) -> ElasticStep:
    """The epoch serves without the leavers: their pods may go."""
    assert step.operation is not None
    nodes = sizing.nodes(step.operation.target.data)
    if group.nodes <= nodes:
        return step
    left = drain_left(group, nodes, step.operation, turn)
    if left > 0:
        return replace(step, waits="streams through leaving pods are open", wake=left)
    return replace(step, nodes=nodes)


def _resting(group: Group, sizing: ElasticState, operation: OperationStatus | None, turn: ElasticTurn) -> ElasticStep:
    """No operation runs. Pods that no size needs go; then the next operation may begin."""
    effective, desired = sizing.effective, turn.desired
    gang = sizing.nodes(effective) if effective else 1
    if desired is None:
        return ElasticStep(nodes=_at_least(group, gang), operation=operation)
    step = held_back(sizing, operation, turn) if effective != desired else ElasticStep(nodes=0, operation=operation)
    wanted = gang if step.gave_up else max(gang, sizing.nodes(desired))
    if group.nodes > wanted:
        return replace(step, nodes=group.nodes if are_streaming(group, wanted) else wanted)
    if effective == desired or step.waits or step.gave_up:
        return replace(step, nodes=_at_least(group, gang))
    if group.nodes < wanted:
        return replace(step, nodes=wanted)
    return ElasticStep(nodes=group.nodes, operation=_begun(group, sizing, operation, desired, turn), begins=True)


def _begun(group: Group, sizing: ElasticState, last: OperationStatus | None, desired: int, turn: ElasticTurn) -> OperationStatus:
    """The id follows from what is stored: a killed operator's successor makes the same one."""
    failed = last is not None and last.phase == "failed" and last.target.data == desired
    in_window = failed and last is not None and turn.now - read_time(last.since) < turn.recovery.window_seconds
    begun = OperationStatus(
        id=f"{group.name}-{desired}-{serial(last) + 1}",
        source=sizing.size(sizing.effective),
        target=sizing.size(desired),
        phase="waiting",
        attempt=last.attempt + 1 if in_window and last is not None else 1,
    )
    return phased(begun, "waiting", turn.now)


def _call(group: Group, operation: OperationStatus, data: int | None) -> ScaleCall | None:
    leader = next((pod for pod in group.live if pod.number == 0), None)
    if leader is None or not leader.address:
        return None
    return ScaleCall(group=group.name, address=leader.address, operation=operation.id, data=data)


def _at_least(group: Group, nodes: int) -> int:
    return max(group.nodes, nodes)
