"""The decision of `plan`. It is carried out in this order: create, apply, delete, calls to leaders, status, events."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from starling_agent.contract.router_report import ServiceNotice
from starling_crds.v1alpha1.status import InferenceServiceStatus

from starling_operator.plan.observed import Manifest, Observed


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes one object of the service, only if it still has this UID.

    grace_seconds   None: the object's own; 0: at once, for a pod whose node is gone
    """

    kind: str
    name: str
    uid: str
    grace_seconds: int | None = None
    why: str = ""


def deletion(observed: Observed, kind: str, name: str, why: str) -> Iterator[Delete]:
    """Deletes a child of the service, if it is there to stay."""
    live = observed.live(kind, name)
    if live is not None:
        yield Delete(kind, name, live["metadata"].get("uid", ""), why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCall:
    """Call to a group's leader, of an operation that the status holds already. It may be repeated: the id is the same.

    address   address of the leader's pod
    data      wanted size in data parallel ranks; None cancels the operation
    """

    group: str
    address: str
    operation: str
    data: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """Event for `kubectl describe`, sent once for each transition."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything to do about one service.

    create             immutable objects; one that exists already is right
    apply              desired state of all other children, for server-side apply; ownerReferences are set
    delete             objects to delete
    status             to be written if it differs from the present one
    child_statuses     statuses of children, written likewise; each with the UID that was seen
    notice             what routers are told of the service
    begins_operation   the status begins an operation: it is written only over the version that was decided from
    scale_calls        calls to leaders
    events             transitions since the last status
    requeue_after      seconds after which to decide again although nothing may have changed; None: never
    """

    create: tuple[Manifest, ...] = ()
    apply: tuple[Manifest, ...] = ()
    delete: tuple[Delete, ...] = ()
    status: InferenceServiceStatus
    child_statuses: tuple[Manifest, ...] = ()
    notice: ServiceNotice = field(default_factory=ServiceNotice)
    begins_operation: bool = False
    scale_calls: tuple[ScaleCall, ...] = ()
    events: tuple[Event, ...] = field(default=())
    requeue_after: float | None = None
