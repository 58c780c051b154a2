"""Several workers, each a process of this node or of others. Imports no torch, so that a core starts at once."""

import logging
import math
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from starling_engine.config import WorkerConfig
from starling_engine.errors import RankLost, StarlingError
from starling_engine.executor.gather import ReplyGather, StepResults
from starling_engine.executor.health import ExecutorHealth, RemoteRanks
from starling_engine.ipc import child
from starling_engine.ipc.listening import listen
from starling_engine.kv.layer_specs import kv_groups, state_group
from starling_engine.kv_offload.orders import TransferChunks
from starling_engine.model_config.config import load_model_config
from starling_engine.step import StepMasks, StepPlan, StepResult
from starling_engine.topology.epoch import Abandon, Commit, Prepare, Prepared, Switched, Unprepared
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.worker.commands import Command, Reply
from starling_engine.worker.counters import ProgressCounters
from starling_engine.worker.messages import (
    Allocate,
    Execute,
    Executed,
    FromWorker,
    Heartbeat,
    Joined,
    MemoryPlanned,
    Phase,
    Start,
    Stop,
    ToWorker,
    TransfersReady,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    WorkerReport,
    transfer_identity,
    worker_identity,
)

logger = logging.getLogger("starling.executor")

WORKER = ("starling_engine.worker",)
HOST = "127.0.0.1"
WATCH_SECONDS = 0.2
STOP_SECONDS = 5.0


class ProcessExecutor:
    """Sends every plan to all ranks of `config.layout`; the rank that samples sends the results. Used by one thread.

    A rank that dies, or makes no step while others wait for it, ends the group: the next call raises RankLost, which says which
    rank it was and how it ended. `patience` is how long, in seconds, a step may stand still. `folder` is the caller's, for sockets.

    With `host`, this node's address, only the first `config.local_ranks` are started here; the others, on other nodes, have to join
    at `joining`.
    """

    def __init__(self, config: WorkerConfig, patience: float, folder: Path, host: str | None = None) -> None:
        self._config = config
        self._patience = patience
        self._ranks = config.layout.world_size
        self._folder = folder
        self._counters = ProgressCounters(self._folder / "progress", self._ranks)
        self._phases = [Phase("starting") for _ in range(self._ranks)]
        self._planned: dict[int, int] = {}
        """KV blocks that each rank has room for."""
        self._ready: dict[int, WorkerReady] = {}
        self._transfers_ready: set[int] = set()
        """Ranks that take transfers."""
        self._results = StepResults(self._ranks)
        self._gather = ReplyGather(self._ranks)
        self._replies: list[Reply] = []
        self._checked = 0.0
        self._awaits_epoch = False
        """A Prepare or Commit has not been answered."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A worker that is started again may come before the end of the one before was noticed.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._host = host or HOST
        local = self._ranks if host is None else min(self._ranks, config.local_ranks)
        self._remote = RemoteRanks(self._socket, range(local, self._ranks), patience)
        # Ranks that wait for those of another core know for whom, so they are to give up first.
        limit = 2 * patience if config.dp_sync else patience
        self._health = ExecutorHealth(config.layout, self._counters, self._remote, limit, self._receive, dp_sync=config.dp_sync)
        self.joining = ""
        self._joined: set[int] = set()
        self._store = 0
        """Port at which rank 0 serves the store in which ranks find each other; 0 until it has joined."""

    @property
    def progress(self) -> int:
        return sum(count.total for count in self._health.counts())

    @property
    def phase(self) -> Phase:
        """Phase of the rank that is furthest behind."""
        waiting = [phase for rank, phase in enumerate(self._phases) if rank not in self._ready]
        return min(waiting, key=lambda p: p.done / p.total if p.total else 0.0, default=Phase("ready"))

    def start(self) -> None:
        address = f"ipc://{self._folder}/workers"
        self._socket.bind(address)
        if self._remote.ranks:
            self.joining = listen(self._socket, self._host)
        for rank in range(self._remote.ranks.start):
            self._health.processes.append(child.start(*WORKER, address, str(rank)))

    def ready(self, timeout: float) -> WorkerReport | None:
        self._receive(timeout)
        self._health.check_alive()
        config = self._config
        if len(self._ready) < self._ranks or (config.tiers is not None and len(self._transfers_ready) < self._ranks):
            return None
        first = self._ready[0]
        model = load_model_config(Path(config.model_path))
        return WorkerReport(
            groups=kv_groups(model, config),
            state=state_group(model, config),
            ledger=first.ledger,
            seconds=[self._ready[rank].seconds for rank in range(self._ranks)],
            async_scheduling=first.async_scheduling,
            step_target_ms=first.step_target_ms,
            makes_drafts=first.makes_drafts,
            store_port=self._store,
        )

    def submit(self, plan: StepPlan) -> None:
        if not self._results:
            self._health.begin()
        self._results.submit(plan.step_id)
        self._send_to_all(Execute(plan))

    def send_masks(self, masks: StepMasks) -> None:
        encoded = self._encode(masks)
        for rank in range(self._ranks):
            if self._config.layout.in_last_stage(rank):
                self._send_encoded(rank, worker_identity(rank), encoded)

    def collect(self, timeout: float) -> StepResult | None:
        end = time.monotonic() + timeout
        while not self._results.ready and not self._replies and (left := end - time.monotonic()) > 0:
            self._receive(min(left, WATCH_SECONDS))
            self._results.check_alike()
            if not self._results.ready and not self._replies:
                self._check_health()
        return self._results.pop() if self._results.ready else None

    def send(self, command: Command) -> None:
        if isinstance(command, Prepare | Commit | Abandon):
            self._awaits_epoch = not isinstance(command, Abandon)
            self._health.begin()
        self._send_to_all(command, transfer_identity if isinstance(command, TransferChunks) else worker_identity)

    def replies(self, timeout: float = 0.0) -> list[Reply]:
        self._receive(0.0 if self._replies else timeout)
        replies, self._replies = self._replies, []
        return replies

    def check(self) -> None:
        now = time.monotonic()
        if now - self._checked > WATCH_SECONDS:
            self._checked = now
            self._receive(0)
            self._results.check_alike()
            self._check_health()

    def shutdown(self) -> None:
        """Idle ranks end by themselves. Those that may be waiting for one that is gone would not read Stop, and are killed."""
        idle = len(self._ready) == self._ranks and not self._results and not self._awaits_epoch
        end = time.monotonic()
        if idle and all(process.poll() is None for process in self._health.processes):
            end += STOP_SECONDS
            for rank in self._ready:
                with suppress(StarlingError):
                    self._send(rank, Stop())
        for process in self._health.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._socket.close()
        self._context.term()

    def _check_health(self) -> None:
        try:
            self._health.check_alive()
        except RankLost:
            self._results.check_alike(patience=0)  # of a rank that ended because another's exchanges no longer matched its own
            raise
        self._health.check_progress(stepping=bool(self._results), awaiting=self._awaits_epoch)

    # ---- messages ----

    def _send(self, rank: int, message: ToWorker) -> None:
        self._send_encoded(rank, worker_identity(rank), self._encode(message))

    def _send_to_all(self, message: ToWorker, identity: Callable[[int], bytes] = worker_identity) -> None:
        encoded = self._encode(message)
        for rank in range(self._ranks):
            self._send_encoded(rank, identity(rank), encoded)

    def _send_encoded(self, rank: int, identity: bytes, message: bytes) -> None:
        try:
            self._socket.send_multipart((identity, message))
        except zmq.ZMQError as error:
            self._receive(0)  # a rank that has ended said why before it did
            self._health.check_alive(patience=1.0)
            raise RankLost(f"rank {rank} cannot be reached: {error}") from error

    def _receive(self, timeout: float) -> None:
        """Receives all messages that are there; waits for the first one at most `timeout` seconds."""
        wait = math.ceil(timeout * 1000)
        while self._socket.poll(wait):
            identity, payload = self._socket.recv_multipart()
            self._handle(int(identity.rpartition(b"/")[2]), self._decode(payload))
            wait = 0

    def _handle(self, rank: int, message: FromWorker) -> None:
        match message:
            case Joined(host, store):
                self._on_joined(rank, host, store)
            case Heartbeat(count):
                self._remote.on_heartbeat(rank, count)
            case WorkerPhase(phase, done, total):
                self._phases[rank] = Phase(phase, done, total)
            case MemoryPlanned(num_blocks):
                self._on_memory_planned(rank, num_blocks)
            case TransfersReady():
                self._transfers_ready.add(rank)
            case WorkerReady():
                self._ready[rank] = message
            case Executed(result):
                self._results.add(rank, result)
            case WorkerFailed(kind, text):
                raise self._health.failure(rank, kind, text)
            case reply:
                self._on_reply(rank, reply)

    def _on_reply(self, rank: int, reply: Reply) -> None:
        merged = self._gather.add(rank, reply)
        if merged is None:
            return
        if isinstance(merged, Prepared | Unprepared | Switched):
            self._awaits_epoch = False
        self._replies.append(merged)

    def _on_joined(self, rank: int, host: str, store: int) -> None:
        """Starts all ranks together when the last one has joined: from then on they wait for each other only so long."""
        if len(self._joined) == self._ranks:
            raise RankLost(f"rank {rank} on {host} was started again")
        self._joined.add(rank)
        self._store = store or self._store
        if host:
            self._remote.join(rank, host)
        if len(self._joined) == self._ranks:
            for other in range(self._ranks):
                self._send(other, Start(self._config_of(other)))

    def _on_memory_planned(self, rank: int, num_blocks: int) -> None:
        self._planned[rank] = num_blocks
        if len(self._planned) == self._ranks:
            self._send_to_all(Allocate(min(self._planned.values())))

    def _config_of(self, rank: int) -> WorkerConfig:
        # Ranks that wait give up after the executor, which knows for whom.
        rendezvous = Rendezvous(self._address(0), self._store, self._address(rank), 2 * self._patience)
        return replace(self._config, rank=rank, rendezvous=rendezvous, counters=str(self._folder / "progress"))

    def _address(self, rank: int) -> str:
        return self._remote.host(rank) if rank in self._remote.ranks else self._host
