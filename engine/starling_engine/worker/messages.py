"""Messages between an executor and its workers, and what a worker reports. Processes send msgpack over ZeroMQ, never pickle.

Imports no torch.
"""

from dataclasses import dataclass

import msgspec

from starling_engine.config import WorkerConfig
from starling_engine.kv.spec import KVGroup, StateGroup
from starling_engine.ledger import Ledger
from starling_engine.step import StepMasks, StepPlan, StepResult
from starling_engine.worker.commands import Command, Reply
from starling_engine.worker.counters import ProgressCount


class Start(msgspec.Struct, tag="start"):
    """The first message to a worker that has joined."""

    config: WorkerConfig


class Allocate(msgspec.Struct, tag="allocate"):
    """The answer to all ranks' MemoryPlanned: the blocks for which the rank with the least memory has room."""

    num_blocks: int


class Execute(msgspec.Struct, tag="execute"):
    plan: StepPlan


class Stop(msgspec.Struct, tag="stop"):
    """End now; nothing is in flight."""


PlanMessage = Execute | Stop | Command
ToReadyWorker = PlanMessage | StepMasks
ToWorker = Start | Allocate | ToReadyWorker


@dataclass(frozen=True, slots=True)
class Phase:
    """Present activity of a worker that is not ready; `done` of `total` bytes, where that is known."""

    name: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class WorkerReport:
    """Report of workers that are ready. `seconds` has, by rank, the time of each step of its start.

    `async_scheduling` and `step_target_ms` are their platform's preferences. Plans may have OWN drafts where it `makes_drafts`.
    `store_port` is the port at which rank 0 serves the store in which ranks find each other; 0 where there is none.
    """

    groups: list[KVGroup]
    state: StateGroup | None
    ledger: Ledger
    seconds: list[dict[str, float]]
    async_scheduling: bool
    step_target_ms: int
    makes_drafts: bool
    store_port: int = 0


class Joined(msgspec.Struct, tag="joined"):
    """A worker process runs and asks for its configuration.

    `host`: its address; empty on the executor's own node. `store`: from rank 0, the port of the store that it serves (see
    `Rendezvous`).
    """

    host: str = ""
    store: int = 0


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Progress of a worker on another node, every HEARTBEAT_SECONDS, from `heartbeat_identity`."""

    count: ProgressCount


class WorkerPhase(msgspec.Struct, tag="phase"):
    """See `Phase`."""

    phase: str
    done: int = 0
    total: int = 0


class MemoryPlanned(msgspec.Struct, tag="memory_planned"):
    """The weights are loaded, and there is room for `num_blocks` KV blocks."""

    num_blocks: int


class TransfersReady(msgspec.Struct, tag="transfers_ready"):
    """The worker takes TransferChunks at `transfer_identity` from now on."""


class WorkerReady(msgspec.Struct, tag="ready"):
    """See `WorkerReport`; the seconds are this rank's."""

    ledger: Ledger
    seconds: dict[str, float]
    async_scheduling: bool
    step_target_ms: int
    makes_drafts: bool


class Executed(msgspec.Struct, tag="executed"):
    """A step's result; from ranks that do not sample, only that the step failed there."""

    result: StepResult


class WorkerFailed(msgspec.Struct, tag="failed"):
    """The worker cannot go on. `kind` is the error's class among `starling_engine.errors`, if it is one of them."""

    kind: str
    message: str


FromWorker = Joined | Heartbeat | WorkerPhase | MemoryPlanned | TransfersReady | WorkerReady | Executed | WorkerFailed | Reply

HEARTBEAT_SECONDS = 0.2


def worker_identity(rank: int) -> bytes:
    """Name of the socket by which a worker receives plans and commands."""
    return str(rank).encode()


def heartbeat_identity(rank: int) -> bytes:
    """Name of the socket by which a worker on another node sends its heartbeats."""
    return f"heartbeat/{rank}".encode()


def result_identity(rank: int) -> bytes:
    """Name of the socket by which a worker sends its results, where a thread of its own waits for them."""
    return f"result/{rank}".encode()


def transfer_identity(rank: int) -> bytes:
    """Name of the socket by which a worker receives TransferChunks and answers them."""
    return f"transfer/{rank}".encode()
