"""An agent's report: `GET /admin/report?after=N&wait=S` with `Authorization: Bearer TOKEN`.

With `&commit=SHA` the operator says which commit of a hub's repository all pods of the revision load; the first one stays.
With `&ends_in=SECONDS` it says when Kubernetes kills the pod, or one that this one cannot go on without.
Answers at once when the report's version is above `after` or of another incarnation (`&incarnation=ID`), else when it changes or
after `wait` seconds (at most 60): a long poll. A quiet agent's report does not change.
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
    """How far the phase is. unit is "bytes" or "tensors"; `eta_seconds` is None while it cannot be told."""

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
    """What each step of a worker's start took. `core` counts the engine cores of this node, `rank` the workers of that core."""

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
    """What this agent is, does and needs.

    version              grows with every change; compare only within one incarnation
    incarnation          id of this agent process
    agent                release of Starling
    config_hash          SHA-256 of the configuration file's bytes, hex
    healthy              /health: work is progressing, or there is none
    ready                /ready: requests are accepted
    asleep               the engine has given memory back, and is not ready until it is woken: `/admin/wake_up`
    token_seen           a real token came through this pod's own endpoint since the engine started
    service_token_seen   a real token came through the Service; None where no Service is configured or it was not tried yet
    engine_restarts      in place, of this process
    last_error           the cause of the last failure in words, with the fix where one is known
    starts               of the workers of this node's engine cores, wherever these workers are
    commit               of the hub's repository: what the name means, until the operator has chosen; then what is loaded
    weights              SHA-256 over the checkpoint's files, without the tensors themselves; None until they are here
    leader               whether this node leads its group; the next two are the leader's alone
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
