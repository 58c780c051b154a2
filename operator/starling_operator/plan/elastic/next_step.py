"""Next step of each elastic group towards the wanted size. At most one thing is done at a time.

    more pods -> operation stored in the status -> call to the leader -> operation followed -> pods that left are removed

A step that was cut short is decided again from what is observed. The leader is called only with an operation that the status holds.
A call without an answer is repeated: the leader knows its id again.

Groups change size one after the other, the lowest number first. So a size that cannot be had is tried on one group only, while the
others serve. And two groups that grow never wait for each other's nodes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.elastic.elastic_state import ElasticState, ended, follow, serial_number, with_phase
from starling_operator.plan.elastic.parallelism_scale import Desired
from starling_operator.plan.group import Group
from starling_operator.plan.observed import LeaderRefusal, Observed, Pod
from starling_operator.plan.timestamps import read_time, rfc3339

FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticInput:
    """Wanted size of one group, and what it may do now.

    desired          wanted size in data parallel ranks; None: it keeps its size, and only finishes an operation that has its pods
    resizes          it may begin a resize now: groups take turns. To get its first size, a group needs no turn
    serves           all pods of its current size serve
    at_wanted_size   all pods of the wanted size serve, and their reports show that size
    answers          refusals of leaders, by operation ID
    """

    desired: int | None
    resizes: bool
    serves: bool
    at_wanted_size: bool
    drain: DrainSpec
    recovery: RecoverySpec
    now: float
    answers: Mapping[str, LeaderRefusal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticDecision:
    """Next action for one group.

    nodes              replicas that the StatefulSet is to have
    operation          the operation to write to the status; None: none is in progress
    begins_operation   the operation is new: write it only if the status is still the one that this decision was made from
    call               call to send to the leader; only for an operation that is already written to the status
    wait_reason        why nothing is done although the size differs from the wanted one; "" if nothing is waited for
    gave_up            nothing more is tried until another size is wanted or the restart window ends
    requeue_after      seconds to the next decision
    """

    nodes: int
    operation: OperationStatus | None = None
    begins_operation: bool = False
    call: ScaleCall | None = None
    wait_reason: str = ""
    gave_up: bool = False
    requeue_after: float | None = None


def elastic_steps(
    observed: Observed,
    spec: InferenceServiceSpec,
    desired: Desired | None,
    kept: Iterable[Group],
    serves: Callable[[Group], bool],
    at_wanted_size: Callable[[Group], bool],
) -> Mapping[str, ElasticDecision]:
    """Returns steps by name, of elastic groups that stay. Groups of an old revision begin no operation."""
    groups = [group for group in kept if group.elastic is not None]
    data = desired.data if desired is not None else None
    has_turn = _whose_turn(groups, data)
    steps = {}
    for group in groups:
        turn = ElasticInput(
            desired=data if group.target else None,
            resizes=group.name == has_turn,
            serves=serves(group),
            at_wanted_size=at_wanted_size(group),
            drain=spec.drain,
            recovery=spec.recovery,
            now=observed.now,
            answers=observed.answers,
        )
        steps[group.name] = next_step(group, turn)
    return steps


def _whose_turn(groups: list[Group], desired: int | None) -> str:
    """Returns the group that changes size now, else the first whose size differs from the wanted one."""
    sizes = [(group, group.elastic) for group in groups if group.elastic is not None]
    busy = (group.name for group, state in sizes if _is_resizing(state))
    others = (group.name for group, state in sizes if group.target and state.effective not in (0, desired))
    return next(busy, "") or next(others, "")


def _is_resizing(state: ElasticState) -> bool:
    return state.is_changing and state.stored is not None and state.stored.source.data > 0


# ---- one group ----


def next_step(group: Group, turn: ElasticInput) -> ElasticDecision:
    """Returns the step of an elastic group."""
    state = group.elastic
    assert state is not None
    if state.leader is None:
        return ElasticDecision(
            nodes=_at_least(group, state.gang or 1), operation=state.stored, wait_reason="its leader has not reported"
        )
    answer = turn.answers.get(state.stored.id) if state.stored is not None else None
    operation = follow(state, answer, closed=_is_closed(group, state, turn), now=turn.now)
    if turn.desired is None and _may_go_back(operation):
        # 0: it has yet to get its first size.
        turn = replace(turn, desired=state.effective or None)
    if operation is not None and not ended(operation):
        return _running(group, state, operation, turn)
    return _idle(group, state, operation, turn)


def _may_go_back(operation: OperationStatus | None) -> bool:
    """True if pods beyond the present size may go. A growth that found no nodes would hold up the groups that replace this one."""
    return operation is None or ended(operation) or operation.phase == "waiting"


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
        return replace(step, wait_reason="streams through leaving pods are open", requeue_after=left)
    return replace(step, nodes=nodes)


def _idle(group: Group, state: ElasticState, operation: OperationStatus | None, turn: ElasticInput) -> ElasticDecision:
    """No operation runs: removes pods that no size needs, then begins the next operation."""
    effective, desired = state.effective, turn.desired
    gang = state.nodes(effective) if effective else 1
    if desired is None:
        return ElasticDecision(nodes=_at_least(group, gang), operation=operation)
    step = _wait_before_next(state, operation, turn) if effective != desired else ElasticDecision(nodes=0, operation=operation)
    wanted = gang if step.gave_up else max(gang, state.nodes(desired))
    if group.nodes > wanted:
        return replace(step, nodes=group.nodes if _are_streaming(group, wanted) else wanted)
    if effective == desired or step.wait_reason or step.gave_up:
        return replace(step, nodes=_at_least(group, gang))
    if group.nodes < wanted:
        return replace(step, nodes=wanted)
    return ElasticDecision(nodes=group.nodes, operation=_begun(group, state, operation, desired, turn), begins_operation=True)


def _wait_before_next(state: ElasticState, operation: OperationStatus | None, turn: ElasticInput) -> ElasticDecision:
    """Returns a step with the reason to wait in `wait_reason`; "" if the next operation may begin. Its `nodes` are not set."""
    step = ElasticDecision(nodes=0, operation=operation)
    again = operation is not None and operation.target.data == turn.desired and operation.source.data == state.effective
    if operation is not None and again and operation.phase == "refused":
        return replace(step, gave_up=True, wait_reason=f"refused by its leader: {operation.error}")
    if operation is not None and again and operation.phase == "failed":
        spent = turn.now - read_time(operation.since)
        if operation.attempt > turn.recovery.restart_budget and spent < turn.recovery.window_seconds:
            left = turn.recovery.window_seconds - spent
            return replace(
                step, gave_up=True, wait_reason=f"failed {operation.attempt} times: {operation.error}", requeue_after=left
            )
        left = backoff(operation.attempt) - spent
        if left > 0:
            when = rfc3339(read_time(operation.since) + backoff(operation.attempt))
            return replace(step, wait_reason=f"failed, tried again at {when}: {operation.error}", requeue_after=left)
    assert state.leader is not None
    reported = state.leader.operation
    if not state.effective and reported is not None and (reported.phase, reported.target) == ("done", turn.desired):
        return replace(step, wait_reason="its leader brings the engine back at this size")
    if state.leader.phase == "failed":
        return replace(step, wait_reason="its leader has failed")
    if state.effective and not turn.resizes:
        return replace(step, wait_reason="groups change size one after the other")
    if state.effective and not turn.serves:
        return replace(step, wait_reason="a group that does not serve is healed first")
    return step


def backoff(attempts: int) -> float:
    """Returns seconds from the end of `attempts` failed attempts to the next: 10, 20, 40, ... 300."""
    return min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempts - 1, 10))


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
    leader = next((pod for pod in group.remaining_pods if pod.number == 0), None)
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
    return tuple(pod for pod in group.remaining_pods if pod.number >= nodes)


def _is_streaming(pod: Pod) -> bool:
    return pod.report is not None and pod.report.open_streams > 0
