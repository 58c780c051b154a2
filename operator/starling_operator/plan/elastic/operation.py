"""Record of an operation in the status: the stored one, updated from the leader's report."""

from starling_agent.contract.scale import Operation
from starling_crds.v1alpha1.status import OperationPhase, OperationStatus, PhaseSeconds

from starling_operator.plan.elastic.elastic_state import ElasticState, ended
from starling_operator.plan.observed import LeaderRefusal
from starling_operator.plan.timestamps import rfc3339

_PROGRESS_STEP = 10
"""Percent. Each step is a write of the status."""


def follow(state: ElasticState, answer: LeaderRefusal | None, *, closed: bool, now: float) -> OperationStatus | None:
    """Returns the new record. `answer`: the leader's refusal of the stored one, or None; `closed`: the target's pods serve."""
    stored, reported = state.stored, state.leader.operation if state.leader is not None else None
    if stored is None:
        return None if reported is None else _adopted(state, reported, closed, now)
    if reported is not None and reported.id == stored.id:
        return stored if ended(stored) else _with_report(state, stored, reported, closed, now)
    if reported is not None and not reported.ended:
        return _adopted(state, reported, closed, now)
    if ended(stored) or answer is None:
        return stored
    return _with_refusal(stored, answer, now)


def serial_number(operation: OperationStatus | None) -> int:
    """Returns the last part of an id that the operator made; 0 for any other id."""
    tail = operation.id.rpartition("-")[2] if operation is not None else ""
    return int(tail) if tail.isascii() and tail.isdigit() else 0


def with_phase(operation: OperationStatus, phase: OperationPhase, now: float, **changes: object) -> OperationStatus:
    since = operation.since if operation.phase == phase and operation.since else rfc3339(now)
    return operation.model_copy(update={**changes, "phase": phase, "since": since})


def _adopted(state: ElasticState, reported: Operation, closed: bool, now: float) -> OperationStatus:
    """Records an operation that only the leader knows: the status was lost, or somebody else began it."""
    known = OperationStatus(
        id=reported.id, source=state.size(reported.source), target=state.size(reported.target), phase="waiting", since=rfc3339(now)
    )
    return _with_report(state, known, reported, closed, now)


def _with_report(state: ElasticState, known: OperationStatus, reported: Operation, closed: bool, now: float) -> OperationStatus:
    phase: OperationPhase = "releasing" if reported.phase == "done" and not closed else reported.phase
    percent = int(reported.progress * 100) // _PROGRESS_STEP * _PROGRESS_STEP
    return with_phase(
        known,
        phase,
        now,
        source=state.size(reported.source),
        target=state.size(reported.target),
        progress=100 if phase == "done" else percent if phase == reported.phase else 0,
        error=reported.error or "",
        seconds=PhaseSeconds(**{name: round(reported.seconds.get(name, 0.0), 3) for name in PhaseSeconds.model_fields}),
    )


def _with_refusal(stored: OperationStatus, answer: LeaderRefusal, now: float) -> OperationStatus:
    if answer.code == "unknown_operation":
        return with_phase(stored, "cancelled", now, error="")
    if answer.code == "invalid_target":
        return with_phase(stored, "refused", now, error=answer.message)
    return stored.model_copy(update={"error": answer.message})
