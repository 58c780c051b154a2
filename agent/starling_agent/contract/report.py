"""An agent's report: `GET /admin/report?after=N&wait=S` with `Authorization: Bearer TOKEN`.

`&commit=SHA` is the commit of a hub's repository that all pods of the revision load; the first one stays.
`&ends_in=SECONDS` is the time until Kubernetes kills the pod, or one that this one cannot go on without.
`&sleep=LEVEL` has the engine sleep while no request runs; `&sleep=0` wakes it, but none that people put to sleep by hand.
`&routed=yes` says that clients are led to routers, so that this agent is to answer them alone; `no`: anybody.
A long poll: the answer comes at once if the version is above `after`, or of another incarnation than `&incarnation=ID`. Else it
comes with the next change, or after `wait` seconds (at most 60). A quiet agent's report does not change.
"""

from typing import Literal

from pydantic import Field

from starling_agent.contract.config import ContractModel
from starling_agent.contract.scale import GroupSize, Operation

Phase = Literal["starting", "downloading", "verifying", "loading", "warming", "serving", "restarting", "draining", "failed"]
PHASES: tuple[Phase, ...] = (
    "starting",
    "downloading",
    "verifying",
    "loading",
    "warming",
    "serving",
    "restarting",
    "draining",
    "failed",
)


class Progress(ContractModel):
    """Progress of the phase. unit is "bytes" or "tensors"; `eta_seconds` is None while it is unknown."""

    done: int = Field(ge=0)
    total: int = Field(ge=0)
    unit: str = "bytes"
    eta_seconds: float | None = None


class Topology(ContractModel):
    """The layout that serves now, read from the engine's membership, not from the configuration."""

    tensor: int = Field(ge=0)
    pipeline: int = Field(ge=0)
    data: int = Field(ge=0)
    expert: int = Field(default=1, ge=0)
    ranks: int = Field(ge=0)


class RankHealth(ContractModel):
    """One rank: the steps it has run, and why it is unhealthy."""

    rank: int
    worker: int
    healthy: bool
    error: str | None = None


class WorkerStart(ContractModel):
    """Seconds of each step of a worker's start. `core` counts the engine cores of this node, `rank` the workers of that core."""

    core: int
    rank: int
    seconds: dict[str, float]


class KVLedger(ContractModel):
    """The KV cache as it was allocated; bytes of one rank."""

    num_blocks: int
    block_size: int
    bytes: int
    max_tokens: int


class Report(ContractModel):
    """State of one agent.

    version              grows with every change; compare only within one incarnation
    incarnation          id of this agent process
    agent                release of Starling
    config_hash          SHA-256 of the configuration file's bytes, hex
    healthy              /health: work is progressing, or there is none
    ready                /ready: requests are accepted
    asleep               the engine has given memory back, and is not ready until `/admin/wake_up`
    token_seen           a real token came through this pod's own endpoint since the engine started
    service_token_seen   a real token came through the Service; None where no Service is configured or it was not tried yet
    engine_restarts      in place, of this process
    last_error           the cause of the last failure, with the fix where one is known
    starts               of the workers of this node's engine cores, on any node
    commit               of the hub's repository: the name's own until the operator has chosen one, then the loaded one
    weights              SHA-256 over the checkpoint's files, without the tensors themselves; None until they are here
    leader               this node leads its group; only the leader has the next two
    size                 of the group, as its nodes have it
    operation            the newest change of size; None before the first
    fatal                restarting cannot help (a bad configuration, a model that does not load); phase is "failed"
    """

    version: int = Field(ge=0)
    incarnation: str
    agent: str
    config_hash: str
    service: str
    revision: str
    group: str
    node: int = Field(ge=0)
    pod: str
    phase: Phase
    progress: Progress | None = None
    healthy: bool = True
    ready: bool = False
    asleep: bool = False
    token_seen: bool = False
    service_token_seen: bool | None = None
    topology: Topology | None = None
    epoch: int = Field(default=0, ge=0)
    ranks: list[RankHealth] = Field(default_factory=list)
    kv: KVLedger | None = None
    starts: list[WorkerStart] = Field(default_factory=list)
    engine_restarts: int = Field(default=0, ge=0)
    open_streams: int = Field(default=0, ge=0)
    last_error: str | None = None
    commit: str | None = None
    weights: str | None = None
    leader: bool = True
    size: GroupSize = Field(default_factory=GroupSize)
    operation: Operation | None = None
    fatal: bool = False
