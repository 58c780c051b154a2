"""Changes of a group's data parallel size while it serves, at the leader's admin endpoint.

    PUT    /admin/scale               ScaleRequest -> 202 Operation, also when the same id is sent again
    GET    /admin/scale?operation=ID  -> 200 Operation of that id, or 404 `unknown_operation`
    DELETE /admin/scale?operation=ID  cancels it before its commit -> 202 Operation, or 409 `too_late`

Refused with OpenAI's error body, and nothing is changed:

    400   `invalid_target`: this group cannot have that size
    401   as everywhere on the admin endpoint
    404   `unknown_operation`
    409   `operation_running`: another one runs
    409   `rank_dead`: a lost rank is no shrink
    409   `not_leader`
"""

from typing import Literal

from pydantic import Field

from starling_agent.contract.config import ContractModel

OperationPhase = Literal["waiting", "preparing", "committing", "releasing", "done", "failed", "cancelled"]
ENDED: tuple[OperationPhase, ...] = ("done", "failed", "cancelled")


class ScaleRequest(ContractModel):
    """`data`: the wanted number of data parallel ranks. Two requests with one `operation` are one operation."""

    operation: str = Field(min_length=1, max_length=200)
    data: int = Field(ge=1)


class LoadedExperts(ContractModel):
    """Experts that ranks loaded from one source; the rate is one rank's."""

    experts: int
    bytes: int
    bytes_per_second: float


class Operation(ContractModel):
    """One change of size, from `source` to `target` data parallel ranks.

    waiting     for the nodes that the target needs to join
    preparing   new ranks load, experts move, communicators are built; the old epoch serves
    committing  all ranks switch at one step
    releasing   leavers give their resources back; their nodes may still have open streams
    done        `epoch` serves; of a shrink: no rank of the epoch is on a node from `nodes` on
    failed      rolled back, the old epoch goes on; `error` says why
    progress    0 to 1, of its phase
    seconds     of each phase that has ended
    nodes       pods that the target needs
    loaded      experts that ranks loaded, by source: "peers" (ranks that held them) or "checkpoint"
    """

    id: str = Field(max_length=200)
    source: int = Field(ge=0)
    target: int = Field(ge=0)
    phase: OperationPhase
    nodes: int = Field(ge=0)
    progress: float = 0.0
    epoch: int = Field(default=0, ge=0)
    error: str | None = None
    seconds: dict[str, float] = Field(default_factory=dict, max_length=16)
    loaded: dict[str, LoadedExperts] = Field(default_factory=dict, max_length=16)

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


class GroupSize(ContractModel):
    """Sizes of the leader's group, in data parallel ranks. None of them is derived from another.

    allocated   ranks for which nodes have joined
    joined      ranks whose workers have loaded
    effective   ranks of the serving epoch
    """

    allocated: int = Field(default=0, ge=0)
    joined: int = Field(default=0, ge=0)
    effective: int = Field(default=0, ge=0)
