"""Changing a group's data parallel size while it serves: what the leader's admin endpoint takes and answers.

    PUT    /admin/scale               ScaleRequest -> 202 Operation, also when the same id is sent again
    GET    /admin/scale?operation=ID  -> 200 Operation of that id, or 404 `unknown_operation`
    DELETE /admin/scale?operation=ID  cancels it before its commit -> 202 Operation, or 409 `too_late`

Refused with OpenAI's error body and nothing changed: 400 `invalid_target` (no size that this group can have),
404 `unknown_operation`, 409 `operation_running` (another one is), 409 `rank_dead` (capacity is lost, and that is no shrink),
409 `not_leader`, 401 as all of the admin endpoint.
"""

from typing import Literal

from pydantic import Field

from starling_agent.contract.config import ContractModel

OperationPhase = Literal["waiting", "preparing", "committing", "releasing", "done", "failed", "cancelled"]
ENDED: tuple[OperationPhase, ...] = ("done", "failed", "cancelled")


class ScaleRequest(ContractModel):
    """`data` is absolute: data parallel ranks that the group is to have. The same `operation` is the same operation."""

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
    releasing   leavers hand back what they hold; their nodes may still have open streams
    done        `epoch` serves; of a shrink: no rank of the epoch is on a node from `nodes` on
    failed      rolled back, the old epoch goes on; `error` says why
    progress    0 to 1, of its phase
    seconds     what each phase that has ended took
    nodes       pods that the target needs
    loaded      what ranks loaded for it, by source: "peers" (ranks that held it) or "checkpoint"
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
    """In data parallel ranks, of the leader's group. None of them is derived from another.

    allocated   for which nodes have joined
    joined      whose workers have loaded
    effective   that step in the serving epoch
    """

    allocated: int = Field(default=0, ge=0)
    joined: int = Field(default=0, ge=0)
    effective: int = Field(default=0, ge=0)
