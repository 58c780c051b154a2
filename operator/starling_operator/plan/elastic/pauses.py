"""Waits before the next operation of a group."""

from dataclasses import replace

from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.elastic.elastic_state import ElasticState
from starling_operator.plan.elastic.step import ElasticDecision, ElasticInput
from starling_operator.plan.timestamps import read_time, rfc3339

FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0


def backoff(attempts: int) -> float:
    """Returns seconds from the end of `attempts` failed attempts to the next: 10, 20, 40, ... 300."""
    return min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempts - 1, 10))


def wait_before_next(state: ElasticState, operation: OperationStatus | None, turn: ElasticInput) -> ElasticDecision:
    """Returns a step with the reason to wait in `waits`; "" if the next operation may begin. Its `nodes` are not set."""
    step = ElasticDecision(nodes=0, operation=operation)
    again = operation is not None and operation.target.data == turn.desired and operation.source.data == state.effective
    if operation is not None and again and operation.phase == "refused":
        return replace(step, gave_up=True, waits=f"refused by its leader: {operation.error}")
    if operation is not None and again and operation.phase == "failed":
        spent = turn.now - read_time(operation.since)
        if operation.attempt > turn.recovery.restart_budget and spent < turn.recovery.window_seconds:
            left = turn.recovery.window_seconds - spent
            return replace(step, gave_up=True, waits=f"failed {operation.attempt} times: {operation.error}", requeue_after=left)
        left = backoff(operation.attempt) - spent
        if left > 0:
            when = rfc3339(read_time(operation.since) + backoff(operation.attempt))
            return replace(step, waits=f"failed, tried again at {when}: {operation.error}", requeue_after=left)
    assert state.leader is not None
    reported = state.leader.operation
    if not state.effective and reported is not None and (reported.phase, reported.target) == ("done", turn.desired):
        return replace(step, waits="its leader brings the engine back at this size")
    if state.leader.phase == "failed":
        return replace(step, waits="its leader has failed")
    if state.effective and not turn.resizes:
        return replace(step, waits="groups change size one after the other")
    if state.effective and not turn.serves:
        return replace(step, waits="a group that does not serve is healed first")
    return step
