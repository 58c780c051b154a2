"""The next step of one live group towards the size that is wanted: at most one thing is done at a time.

    more pods -> the operation is stored in the status -> the leader is told -> it is followed -> pods that left go

A step that was cut short is decided again from what is there: the leader is told only what the status holds, by an id that it knows
again, and an answer that did not come is asked for by telling it the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec
from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.clock import rfc3339
from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.elastic.following import follow, phased, serial
from starling_operator.plan.elastic.sizing import Sizing, ended
from starling_operator.plan.group import Group
from starling_operator.plan.observed import Answer, Pod

FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one group may do now.

    desired   size in data parallel ranks; None: it keeps its own, and only ends what it has begun
    resizes   it may begin to change size. The first size of a group never waits for a turn
    serves    all pods of its present size serve
    whole     so do all pods of the size that is wanted, and report its topology
    """

    desired: int | None
    resizes: bool
    serves: bool
    whole: bool
    drain: DrainSpec
    recovery: RecoverySpec
    now: float
    answers: Mapping[str, Answer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """nodes       pods that the StatefulSet is to ask for
    operation   what the status is to hold
    begins      the operation is new: its write must not pass one that was not seen
    call        what the leader is told, of an operation that the status already holds
    waits       why nothing is done although the size is another one
    gave_up     nothing will be done unless another size is asked for
    wake        seconds to the next look
    """

    nodes: int
    operation: OperationStatus | None = None
    begins: bool = False
    call: ScaleCall | None = None
    waits: str = ""
    gave_up: bool = False
    wake: float | None = None


def next_step(group: Group, turn: Turn) -> Step:
    """Of a group that is elastic."""
    sizing = group.sizing
    assert sizing is not None
    if sizing.leader is None:
        return Step(nodes=_at_least(group, sizing.gang or 1), operation=sizing.stored, waits="its leader has not reported")
    answer = turn.answers.get(sizing.stored.id) if sizing.stored is not None else None
    operation = follow(sizing, answer, closed=_is_closed(group, sizing, turn), now=turn.now)
    if operation is not None and not ended(operation):
        return _running(group, sizing, operation, turn)
    return _resting(group, sizing, operation, turn)


def backoff(attempts: int) -> float:
    """Seconds from the end of so many failed attempts to the next: 10, 20, 40, ... 300."""
    return min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempts - 1, 10))


def _is_closed(group: Group, sizing: Sizing, turn: Turn) -> bool:
    """Of an operation that the leader calls done: leavers are gone, and new pods serve, unless another size is wanted by now."""
    told = sizing.leader.operation if sizing.leader is not None else None
    if told is None or group.nodes > sizing.nodes(told.target):
        return False
    return turn.whole or turn.desired != told.target


def _running(group: Group, sizing: Sizing, operation: OperationStatus, turn: Turn) -> Step:
    assert sizing.leader is not None
    told = sizing.leader.operation
    known = told is not None and told.id == operation.id
    is_stored = sizing.stored is not None and sizing.stored.id == operation.id
    step = Step(nodes=_at_least(group, sizing.gang or 1), operation=operation)
    if known and told is not None and told.phase in ("committing", "releasing", "done"):
        return _release(group, sizing, step, turn) if told.phase == "done" else step
    if turn.desired not in (None, operation.target.data):
        return replace(step, call=_call(group, operation, None)) if is_stored else step
    needed = _at_least(group, sizing.nodes(operation.target.data))
    if known or not is_stored or needed > group.nodes:
        return replace(step, nodes=needed)
    return replace(step, call=_call(group, operation, operation.target.data))


def _release(group: Group, sizing: Sizing, step: Step, turn: Turn) -> Step:
    """The epoch serves without the leavers: their pods go when nobody is streamed to through them, or has been for too long."""
    assert step.operation is not None
    nodes = sizing.nodes(step.operation.target.data)
    if group.nodes <= nodes:
        return step
    left = _drain_left(_leavers(group, nodes), step.operation, turn)
    if left > 0:
        return replace(step, waits=f"{_streaming(group, nodes)} streams through leaving pods are open", wake=left)
    return replace(step, nodes=nodes)


def _resting(group: Group, sizing: Sizing, operation: OperationStatus | None, turn: Turn) -> Step:
    """No operation runs. Pods that no size needs go; then the next operation may begin."""
    effective, desired = sizing.effective, turn.desired
    gang = sizing.nodes(effective) if effective else 1
    if desired is None:
        return Step(nodes=_at_least(group, gang), operation=operation)
    step = _held_back(sizing, operation, turn) if effective != desired else Step(nodes=0, operation=operation)
    wanted = gang if step.gave_up else max(gang, sizing.nodes(desired))
    if group.nodes > wanted:
        streaming = any(_is_streaming(pod) for pod in _leavers(group, wanted))
        return replace(step, nodes=group.nodes if streaming else wanted)
    if effective == desired or step.waits or step.gave_up:
        return replace(step, nodes=_at_least(group, gang))
    if group.nodes < wanted:
        return replace(step, nodes=wanted)
    return Step(nodes=group.nodes, operation=_begun(group, sizing, operation, desired, turn), begins=True)


def _held_back(sizing: Sizing, operation: OperationStatus | None, turn: Turn) -> Step:
    """Whether the next operation has to wait, and for what. `nodes` is not decided here."""
    step = Step(nodes=0, operation=operation)
    again = operation is not None and operation.target.data == turn.desired and operation.source.data == sizing.effective
    if operation is not None and again and operation.phase == "refused":
        return replace(step, gave_up=True, waits=f"refused by its leader: {operation.error}")
    if operation is not None and again and operation.phase == "failed":
        spent = turn.now - _time(operation.since)
        if operation.attempt > turn.recovery.restart_budget and spent < turn.recovery.window_seconds:
            left = turn.recovery.window_seconds - spent
            return replace(step, gave_up=True, waits=f"failed {operation.attempt} times: {operation.error}", wake=left)
        left = backoff(operation.attempt) - spent
        if left > 0:
            when = rfc3339(_time(operation.since) + backoff(operation.attempt))
            return replace(step, waits=f"failed, tried again at {when}: {operation.error}", wake=left)
    assert sizing.leader is not None
    told = sizing.leader.operation
    if not sizing.effective and told is not None and (told.phase, told.target) == ("done", turn.desired):
        return replace(step, waits="its leader brings the engine back at this size")
    if sizing.leader.phase == "failed":
        return replace(step, waits="its leader has failed")
    if sizing.effective and not turn.resizes:
        return replace(step, waits="groups change size one after the other")
    if sizing.effective and not turn.serves:
        return replace(step, waits="a group that does not serve is healed first")
    return step


def _begun(group: Group, sizing: Sizing, last: OperationStatus | None, desired: int, turn: Turn) -> OperationStatus:
    """The id follows from what is stored: a killed operator's successor makes the same one."""
    failed = last is not None and last.phase == "failed" and last.target.data == desired
    in_window = failed and last is not None and turn.now - _time(last.since) < turn.recovery.window_seconds
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


def _leavers(group: Group, nodes: int) -> tuple[Pod, ...]:
    return tuple(pod for pod in group.live if pod.number >= nodes)


def _is_streaming(pod: Pod) -> bool:
    return pod.report is not None and pod.report.open_streams > 0


def _streaming(group: Group, nodes: int) -> int:
    return sum(pod.report.open_streams for pod in _leavers(group, nodes) if pod.report is not None)


def _drain_left(leavers: Iterable[Pod], operation: OperationStatus, turn: Turn) -> float:
    """Seconds that they may still take. One that runs and has not reported may have streams too."""
    open_ones = [pod for pod in leavers if _is_streaming(pod) or (pod.report is None and pod.phase == "Running")]
    if not open_ones:
        return 0.0
    return _time(operation.since) + turn.drain.accept_seconds + turn.drain.seconds - turn.now


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
