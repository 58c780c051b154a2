"""Input (`ElasticInput`) and output (`ElasticDecision`) of the decision how to resize one elastic group."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec
from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.observed import LeaderRefusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticInput:
    """Wanted size of one group, and what it may do now.

    desired          wanted size in data parallel ranks; None: it keeps its size, and only finishes the operation in progress
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
    waits              why nothing is done although the size differs from the wanted one; "" if nothing is waited for
    gave_up            nothing more is tried until another size is wanted or the restart window ends
    requeue_after      seconds to the next decision
    """

    nodes: int
    operation: OperationStatus | None = None
    begins_operation: bool = False
    call: ScaleCall | None = None
    waits: str = ""
    gave_up: bool = False
    requeue_after: float | None = None
