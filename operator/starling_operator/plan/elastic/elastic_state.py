"""Size and operation of one elastic group, from its leader's report and from the status."""

from dataclasses import dataclass

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.report import Report
from starling_agent.contract.scale import Operation
from starling_crds.v1alpha1.status import OperationPhase, OperationStatus, PhaseSeconds, Size

from starling_operator.plan.observed import LeaderRefusal
from starling_operator.plan.timestamps import rfc3339

ENDED = ("done", "failed", "cancelled", "refused")
COMMITTED = ("releasing", "done")
_PROGRESS_STEP = 10
"""Percent. Each step is a write of the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticState:
    """Sizes are data parallel ranks.

    layout   layout of the group's revision, which need not be the target
    leader   newest report of node 0; None while it has not answered
    stored   operation in the status; None: there was none, or the status was lost
    """

    layout: LayoutConfig
    leader: Report | None = None
    stored: OperationStatus | None = None

    @property
    def effective(self) -> int:
        """Size of the serving epoch; 0: there is none yet. While the leader is silent, the last known one."""
        if self.leader is not None:
            return self.leader.size.effective
        if self.stored is None:
            return 0
        return self.stored.target.data if self.stored.phase in COMMITTED else self.stored.source.data

    @property
    def is_changing(self) -> bool:
        return self.stored is not None and not ended(self.stored)

    @property
    def gang(self) -> int | None:
        """Pods that hold the ranks of the serving epoch; None while there is none."""
        return self.nodes(self.effective) if self.effective else None

    @property
    def needed(self) -> int | None:
        """Pods that have to serve for the group to serve. While it changes size, those of the smaller size.

        Nodes learn of a commit one after the other, and new ones get ready after it.
        """
        if not self.effective or self.stored is None or not self.is_changing:
            return self.gang
        sizes = {self.effective, self.stored.source.data, self.stored.target.data}
        return self.nodes(min(sizes - {0}))

    def nodes(self, data: int) -> int:
        """Pods of a group of this size."""
        return self.layout.at(data).nodes

    def size(self, data: int) -> Size:
        return Size(data=data, expert=self.layout.at(data).expert)


def ended(operation: OperationStatus) -> bool:
    return operation.phase in ENDED


# ---- the record of an operation in the status ----


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
