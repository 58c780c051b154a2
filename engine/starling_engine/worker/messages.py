"""Messages between an executor and its worker processes: msgpack over ZeroMQ, never pickle. Imports no torch."""

import msgspec

from starling_engine.config import WorkerConfig
from starling_engine.kv_offload.orders import Order, TierStatus, TransferDone
from starling_engine.ledger import Ledger
from starling_engine.sleep import MemoryOrderDone, ReleaseMemory, RestoreMemory
from starling_engine.step import StepPlan, StepResult
from starling_engine.topology.epoch import Abandon, Balance, Commit, Prepare, Prepared, Rearranged, Switched, Unprepared
from starling_engine.worker.counters import ProgressCount


class Start(msgspec.Struct, tag="start"):
    """The first message to a worker that has joined."""

    config: WorkerConfig


class Allocate(msgspec.Struct, tag="allocate"):
    """The answer to all ranks' Planned: what the one with the least memory has room for."""

    num_blocks: int


class Execute(msgspec.Struct, tag="execute"):
    plan: StepPlan


class Idle(msgspec.Struct, tag="idle"):
    """No plan follows the last one at once: the worker need not wait for it to step with other cores' ranks."""


class Stop(msgspec.Struct, tag="stop"):
    """End now; nothing is in flight."""


ToWorker = Start | Allocate | Execute | Idle | ReleaseMemory | RestoreMemory | Prepare | Commit | Abandon | Stop


class Joined(msgspec.Struct, tag="joined"):
    """A worker process runs and asks for its configuration.

    `host`: its address; empty on the executor's own node. `store`: from rank 0, the port of the store that it serves (see
    `Rendezvous`).
    """

    host: str = ""
    store: int = 0


class Heartbeat(msgspec.Struct, tag="beat"):
    """How far a worker on another node is, every BEAT_SECONDS, from `heartbeat_identity`."""

    count: ProgressCount


class WorkerPhase(msgspec.Struct, tag="working"):
    """See `Phase`."""

    phase: str
    done: int = 0
    total: int = 0


class MemoryPlanned(msgspec.Struct, tag="planned"):
    """The weights are loaded, and so many KV blocks would fit."""

    num_blocks: int


class WorkerReady(msgspec.Struct, tag="ready"):
    """See `WorkerReport`; the seconds are this rank's."""

    ledger: Ledger
    seconds: dict[str, float]
    async_scheduling: bool
    step_target_ms: int


class Executed(msgspec.Struct, tag="executed"):
    """A step's result; from ranks that do not sample, only that the step failed there."""

    result: StepResult


class WorkerFailed(msgspec.Struct, tag="failed"):
    """The worker cannot go on. `kind` is the error's class among `starling_engine.errors`, if it is one of them."""

    kind: str
    message: str


class TransferChunks(msgspec.Struct, tag="moves"):
    """Chunks to move between tiers, to `transfer_identity`. From there without any, it says that orders are taken from now on."""

    orders: list[Order]


FromWorker = (
    Joined
    | Heartbeat
    | WorkerPhase
    | MemoryPlanned
    | WorkerReady
    | Executed
    | MemoryOrderDone
    | Prepared
    | Unprepared
    | Switched
    | Balance
    | Rearranged
    | TransferChunks
    | TransferDone
    | TierStatus
    | WorkerFailed
)

HEARTBEAT_SECONDS = 0.2


def heartbeat_identity(rank: int) -> bytes:
    """Name of the socket that a worker on another node sends its beats from; plans come to the one named by the rank alone."""
    return f"beat/{rank}".encode()


def answer_identity(rank: int) -> bytes:
    """Name of the socket that a worker sends its results from, where a thread of its own waits for them."""
    return f"answer/{rank}".encode()


def transfer_identity(rank: int) -> bytes:
    """Name of the socket that a worker takes orders to move chunks from, and answers them by."""
    return f"move/{rank}".encode()
