"""What `plan` decides. It is carried out in this order: create, apply, delete; then leaders are told, then the status is
written.
"""

from dataclasses import dataclass, field
from typing import Literal

from starling_crds.v1alpha1.status import InferenceServiceStatus

from starling_operator.plan.observed import Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes one object of the service, only while its UID is still this one.

    grace_seconds   None: the object's own; 0: at once, for a pod whose node is gone
    """

    kind: str
    name: str
    uid: str
    grace_seconds: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCall:
    """Tells a group's leader about an operation that the status holds already; told again it is the same operation.

    address   of the leader's pod
    data      the wanted size in data parallel ranks; None cancels the operation
    """

    group: str
    address: str
    operation: str
    data: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """For `kubectl describe`. The same event is sent once for each transition."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """create       made once and never changed after (immutable objects); already there is fine
    apply        the desired state of all other children, by server-side apply with ownerReferences set
    delete       what has to go
    status       to be written, if it differs from what is there
    statuses     of children, likewise; each with the UID that it was seen with
    begins       the status begins an operation: it is only written over the version that was decided from
    scale        what leaders are told
    events       transitions since the last status
    wake_after   seconds after which to decide again although nothing may have changed; None: never
    """

    create: tuple[Manifest, ...] = ()
    apply: tuple[Manifest, ...] = ()
    delete: tuple[Delete, ...] = ()
    status: InferenceServiceStatus
    statuses: tuple[Manifest, ...] = ()
    begins: bool = False
    scale: tuple[ScaleCall, ...] = ()
    events: tuple[Event, ...] = field(default=())
    wake_after: float | None = None
