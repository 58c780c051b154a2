"""Next step of one group towards the wanted size. At most one thing is done at a time.

    more pods -> operation stored in the status -> call to the leader -> operation followed -> pods that left are removed

A step that was cut short is decided again from what is observed. The leader is called only with an operation that the status holds.
A call without an answer is repeated: the leader knows its id again.
"""

from dataclasses import replace

from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.elastic.elastic_state import ElasticState, ended
from starling_operator.plan.elastic.operation import follow, serial_number, with_phase
from starling_operator.plan.elastic.pauses import wait_before_next
from starling_operator.plan.elastic.step import ElasticDecision, ElasticInput
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Pod
from starling_operator.plan.timestamps import read_time


def next_step(group: Group, turn: ElasticInput) -> ElasticDecision:
    """Returns the step of an elastic group."""
    state = group.elastic
    assert state is not None
    if state.leader is None:
        return ElasticDecision(nodes=_at_least(group, state.gang or 1), operation=state.stored, waits="its leader has not reported")
    answer = turn.answers.get(state.stored.id) if state.stored is not None else None
    operation = follow(state, answer, closed=_is_closed(group, state, turn), now=turn.now)
    if operation is not None and not ended(operation):
        return _running(group, state, operation, turn)
    return _idle(group, state, operation, turn)


def _is_closed(group: Group, state: ElasticState, turn: ElasticInput) -> bool:
    """True if an operation that the leader reports as done is complete: leavers are gone, and new pods serve or are unwanted."""
    reported = state.leader.operation if state.leader is not None else None
    if reported is None or group.nodes > state.nodes(reported.target):
        return False
    return turn.at_wanted_size or turn.desired != reported.target


def _running(group: Group, state: ElasticState, operation: OperationStatus, turn: ElasticInput) -> ElasticDecision:
    assert state.leader is not None
    reported = state.leader.operation
    known = reported is not None and reported.id == operation.id
    is_stored = state.stored is not None and state.stored.id == operation.id
    step = ElasticDecision(nodes=_at_least(group, state.gang or 1), operation=operation)
    if known and reported is not None and reported.phase in ("committing", "releasing", "done"):
        return _release(group, state, step, turn) if reported.phase == "done" else step
    if turn.desired not in (None, operation.target.data):
        return replace(step, call=_call(group, operation, None)) if is_stored else step
    needed = _at_least(group, state.nodes(operation.target.data))
    if known or not is_stored or needed > group.nodes:
        return replace(step, nodes=needed)
    return replace(step, call=_call(group, operation, operation.target.data))


def _release(group: Group, state: ElasticState, step: ElasticDecision, turn: ElasticInput) -> ElasticDecision:
    """The new epoch serves without the leavers: their pods may be removed."""
    assert step.operation is not None
    nodes = state.nodes(step.operation.target.data)
    if group.nodes <= nodes:
        return step
    left = _drain_seconds_left(group, nodes, step.operation, turn)
    if left > 0:
        return replace(step, waits="streams through leaving pods are open", requeue_after=left)
    return replace(step, nodes=nodes)


def _idle(group: Group, state: ElasticState, operation: OperationStatus | None, turn: ElasticInput) -> ElasticDecision:
    """No operation runs: removes pods that no size needs, then begins the next operation."""
    effective, desired = state.effective, turn.desired
    gang = state.nodes(effective) if effective else 1
    if desired is None:
        return ElasticDecision(nodes=_at_least(group, gang), operation=operation)
    step = wait_before_next(state, operation, turn) if effective != desired else ElasticDecision(nodes=0, operation=operation)
    wanted = gang if step.gave_up else max(gang, state.nodes(desired))
    if group.nodes > wanted:
        return replace(step, nodes=group.nodes if _are_streaming(group, wanted) else wanted)
    if effective == desired or step.waits or step.gave_up:
        return replace(step, nodes=_at_least(group, gang))
    if group.nodes < wanted:
        return replace(step, nodes=wanted)
    return ElasticDecision(nodes=group.nodes, operation=_begun(group, state, operation, desired, turn), begins_operation=True)


def _begun(group: Group, state: ElasticState, last: OperationStatus | None, desired: int, turn: ElasticInput) -> OperationStatus:
    """Begins an operation. Its id follows from the stored one, so that a restarted operator makes the same."""
    failed = last is not None and last.phase == "failed" and last.target.data == desired
    in_window = failed and last is not None and turn.now - read_time(last.since) < turn.recovery.window_seconds
    begun = OperationStatus(
        id=f"{group.name}-{desired}-{serial_number(last) + 1}",
        source=state.size(state.effective),
        target=state.size(desired),
        phase="waiting",
        attempt=last.attempt + 1 if in_window and last is not None else 1,
    )
    return with_phase(begun, "waiting", turn.now)


def _call(group: Group, operation: OperationStatus, data: int | None) -> ScaleCall | None:
    leader = next((pod for pod in group.live if pod.number == 0), None)
    if leader is None or not leader.address:
        return None
    return ScaleCall(group=group.name, address=leader.address, operation=operation.id, data=data)


def _at_least(group: Group, nodes: int) -> int:
    return max(group.nodes, nodes)


def _are_streaming(group: Group, nodes: int) -> bool:
    """True if streams are open through leavers."""
    return any(_is_streaming(pod) for pod in _leavers(group, nodes))


def _drain_seconds_left(group: Group, nodes: int, operation: OperationStatus, turn: ElasticInput) -> float:
    """Returns the seconds that leavers may still take. One that runs and has not reported may have streams too."""
    leavers = _leavers(group, nodes)
    if not any(_is_streaming(pod) or (pod.report is None and pod.phase == "Running") for pod in leavers):
        return 0.0
    return read_time(operation.since) + turn.drain.accept_seconds + turn.drain.seconds - turn.now


def _leavers(group: Group, nodes: int) -> tuple[Pod, ...]:
    """Pods beyond the first `nodes`: no size needs them any more."""
    return tuple(pod for pod in group.live if pod.number >= nodes)


def _is_streaming(pod: Pod) -> bool:
    return pod.report is not None and pod.report.open_streams > 0
