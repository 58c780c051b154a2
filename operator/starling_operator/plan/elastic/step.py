"""What is decided about one live group, and from what."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from starling_crds.v1alpha1.lifecycle import DrainSpec, RecoverySpec
from starling_crds.v1alpha1.status import OperationStatus

from starling_operator.plan.decision import ScaleCall
from starling_operator.plan.observed import LeaderAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTurn:
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
    answers: Mapping[str, LeaderAnswer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticStep:
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
