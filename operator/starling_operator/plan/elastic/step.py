"""Input and output of the decision about one elastic group."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec
from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.observed import LeaderAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTurn:
    """Wanted size of one group, and what it may do now.

    desired          size in data parallel ranks; None: it keeps its own, and only ends the operation that it has begun
    resizes          it may begin to change size. The first size of a group never waits for a turn
    serves           all pods of its present size serve
    at_wanted_size   all pods of the wanted size serve and report its topology
    answers          refusals of leaders, by operation
    """

    desired: int | None
    resizes: bool
    serves: bool
    at_wanted_size: bool
    drain: DrainSpec
    recovery: RecoverySpec
    now: float
    answers: Mapping[str, LeaderAnswer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticStep:
    """Step of one group.

    nodes              pods that the StatefulSet is to have
    operation          record for the status
    begins_operation   the operation is new: it may only be written over the status that was decided from
    call               call to the leader, of an operation that the status already holds
    waits              why nothing is done although the size differs from the wanted one
    gave_up            nothing will be done until another size is wanted, or the window of restarts ends
    requeue_after      seconds to the next decision
    """

    nodes: int
    operation: OperationStatus | None = None
    begins_operation: bool = False
    call: ScaleCall | None = None
    waits: str = ""
    gave_up: bool = False
    requeue_after: float | None = None
