"""What the status is to hold of an operation: what was stored, brought up to what the leader says of it."""

from starling_agent.contract.scale import Operation
from starling_crds.v1alpha1.status import OperationPhase, OperationStatus, PhaseSeconds

from starling_operator.plan.clock import rfc3339
from starling_operator.plan.elastic.elastic_state import ElasticState, ended
from starling_operator.plan.observed import LeaderAnswer

_PROGRESS_STEP = 10
"""Percent: each step is a write of the status."""


def follow(sizing: ElasticState, answer: LeaderAnswer | None, *, closed: bool, now: float) -> OperationStatus | None:
    """`answer`: the leader's refusal of the stored operation, if it gave one. `closed`: pods are as the target needs them."""
    stored, told = sizing.stored, sizing.leader.operation if sizing.leader is not None else None
    if stored is None:
        return None if told is None else _adopted(sizing, told, closed, now)
    if told is not None and told.id == stored.id:
        return stored if ended(stored) else _as_told(sizing, stored, told, closed, now)
    if told is not None and not told.ended:
        return _adopted(sizing, told, closed, now)
    if ended(stored) or answer is None:
        return stored
    return _as_answered(stored, answer, now)


def serial(operation: OperationStatus | None) -> int:
    """Of the ids that the operator makes, their last part; 0 for another's."""
    tail = operation.id.rpartition("-")[2] if operation is not None else ""
    return int(tail) if tail.isascii() and tail.isdigit() else 0


def phased(operation: OperationStatus, phase: OperationPhase, now: float, **changes: object) -> OperationStatus:
    since = operation.since if operation.phase == phase and operation.since else rfc3339(now)
    return operation.model_copy(update={**changes, "phase": phase, "since": since})


def _adopted(sizing: ElasticState, told: Operation, closed: bool, now: float) -> OperationStatus:
    """The leader runs, or ran, what the status does not know: it was lost, or somebody else asked for it."""
    known = OperationStatus(
        id=told.id, source=sizing.size(told.source), target=sizing.size(told.target), phase="waiting", since=rfc3339(now)
    )
    return _as_told(sizing, known, told, closed, now)


def _as_told(sizing: ElasticState, known: OperationStatus, told: Operation, closed: bool, now: float) -> OperationStatus:
    phase: OperationPhase = "releasing" if told.phase == "done" and not closed else told.phase
    percent = int(told.progress * 100) // _PROGRESS_STEP * _PROGRESS_STEP
    return phased(
        known,
        phase,
        now,
        source=sizing.size(told.source),
        target=sizing.size(told.target),
        progress=100 if phase == "done" else percent if phase == told.phase else 0,
        error=told.error or "",
        seconds=PhaseSeconds(**{name: round(told.seconds.get(name, 0.0), 3) for name in PhaseSeconds.model_fields}),
    )


def _as_answered(stored: OperationStatus, answer: LeaderAnswer, now: float) -> OperationStatus:
    if answer.code == "unknown_operation":
        return phased(stored, "cancelled", now, error="")
    if answer.code == "invalid_target":
        return phased(stored, "refused", now, error=answer.message)
    return stored.model_copy(update={"error": answer.message})
