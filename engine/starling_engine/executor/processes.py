"""Several workers, each a process of this node or of others. Imports no torch, so that a core starts at once."""

import logging
import math
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from starling_engine.config import WorkerConfig
from starling_engine.errors import RankLost, StarlingError
from starling_engine.executor.health import ExecutorHealth
from starling_engine.executor.remote import RemoteRanks
from starling_engine.executor.results import StepResults
from starling_engine.ipc import child
from starling_engine.ipc.listening import listen
from starling_engine.kv.layer_specs import kv_groups
from starling_engine.kv_offload.orders import Order, TierStatus, TransferDone, merge, merge_standing
from starling_engine.model_config.config import load_model_config
from starling_engine.sleep import MemoryOrderDone, RestOrder, of_all_ranks
from starling_engine.step import StepPlan, StepResult
from starling_engine.topology.epoch import (
    Abandon,
    Balance,
    EpochAnswer,
    EpochOrder,
    Prepared,
    Rearranged,
    Switched,
    Unprepared,
    merge_loaded,
)
from starling_engine.topology.rendezvous import Rendezvous
from starling_engine.worker.counters import ProgressCounters
from starling_engine.worker.messages import (
    Allocate,
    Execute,
    Executed,
    FromWorker,
    Heartbeat,
    Idle,
    Joined,
    MemoryPlanned,
    Start,
    Stop,
    ToWorker,
    TransferChunks,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    transfer_identity,
)
from starling_engine.worker.report import Phase, WorkerReport

logger = logging.getLogger("starling.executor")

WORKER = ("starling_engine.worker",)
HOST = "127.0.0.1"
WATCH_SECONDS = 0.2
STOP_SECONDS = 5.0


class ProcessExecutor:
    """Sends every plan to all ranks of `config.layout`; the rank that samples answers. Used by one thread.

    A rank that dies, or makes no step while others wait for it, ends the group: the next call raises RankLost, which says which
    rank it was and how it ended. `patience` is how long, in seconds, a step may stand still. `folder` is the caller's, for sockets.

    With `host`, this node's address, only the first `config.local_ranks` are started here; whoever starts the others, on other
    nodes, has them join at `joining`.
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
        self._results = StepResults(self._ranks)
        self._answers: list[EpochAnswer] = []
        self._answered: dict[tuple[type, int], list[EpochAnswer]] = {}
        """By kind and epoch, what ranks have answered of which not all have."""
        self._balances: list[Balance | Rearranged] = []
        self._movers: set[int] = set()
        """Ranks that take orders to move chunks."""
        self._partly_done: dict[int, list[TransferDone]] = {}
        self._moved: list[TransferDone] = []
        self._standing: dict[int, TierStatus] = {}
        """By rank, the newest."""
        self._stands_anew = False
        self._rested: dict[int, MemoryOrderDone] = {}
        """By rank, of those that have answered."""
        self._checked = 0.0
        self._ordered = False
        """An order has not been answered."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A worker that is started again may come before the end of the one before was noticed.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._host = host or HOST
        here = self._ranks if host is None else min(self._ranks, config.local_ranks)
        self._remote = RemoteRanks(self._socket, range(here, self._ranks), patience)
        # Ranks that wait for those of another core know for whom, so they are to give up first.
        limit = 2 * patience if config.lockstep else patience
        self._health = ExecutorHealth(config.layout, self._counters, self._remote, limit, self._take, lockstep=config.lockstep)
        self.joining = ""
        self._joined: set[int] = set()
        self._store = 0

    @property
    def progress(self) -> int:
        return sum(count.total for count in self._health.counts())

    @property
    def phase(self) -> Phase:
        """The rank's that is furthest behind."""
        waiting = [phase for rank, phase in enumerate(self._phases) if rank not in self._ready]
        return min(waiting, key=lambda p: p.done / p.total if p.total else 0.0, default=Phase("ready"))

    @property
    def store_port(self) -> int:
        return self._store

    def start(self) -> None:
        address = f"ipc://{self._folder}/workers"
        self._socket.bind(address)
        if self._remote.ranks:
            self.joining = listen(self._socket, self._host)
        for rank in range(self._remote.ranks.start):
            self._health.processes.append(child.start(*WORKER, address, str(rank)))

    def ready(self, timeout: float) -> WorkerReport | None:
        self._take(timeout)
        self._health.check_alive()
        if len(self._ready) < self._ranks or (self._config.tiers is not None and len(self._movers) < self._ranks):
            return None
        first = self._ready[0]
        config = self._config
        groups = kv_groups(load_model_config(Path(config.model_path)), config)
        seconds = [self._ready[rank].seconds for rank in range(self._ranks)]
        return WorkerReport(groups, first.ledger, seconds, first.async_scheduling, first.step_target_ms)

    def submit(self, plan: StepPlan) -> None:
        if not self._results:
            self._health.begin()
        self._results.submit(plan.step_id)
        self._tell(Execute(plan))

    def idle(self) -> None:
        if self._config.lockstep:
            self._tell(Idle())

    def order(self, order: EpochOrder) -> None:
        self._ordered = not isinstance(order, Abandon)
        self._health.begin()
        self._tell(order)

    def answers(self) -> list[EpochAnswer]:
        self._take(0)
        answers, self._answers = self._answers, []
        self._ordered = self._ordered and not answers
        return answers

    def balances(self) -> list[Balance | Rearranged]:
        told, self._balances = self._balances, []
        return told

    def rest(self, order: RestOrder) -> None:
        self._tell(order)

    def rested(self) -> MemoryOrderDone | None:
        self._take(0)
        if len(self._rested) < self._ranks:
            return None
        rested, self._rested = self._rested, {}
        return of_all_ranks(rested)

    def collect(self, timeout: float) -> StepResult | None:
        end = time.monotonic() + timeout
        while not self._results.ready and not self._moved and (left := end - time.monotonic()) > 0:
            self._take(min(left, WATCH_SECONDS))
            self._results.check_alike()
            if not self._results.ready and not self._moved:
                self._check_health()
        return self._results.pop() if self._results.ready else None

    def move(self, orders: list[Order]) -> None:
        encoded = self._encode(TransferChunks(orders))
        for rank in range(self._ranks):
            self._send_to(transfer_identity(rank), rank, encoded)

    def moved(self, timeout: float) -> list[TransferDone]:
        if not self._moved:
            self._take(timeout)
        moved, self._moved = self._moved, []
        return moved

    def standing(self) -> TierStatus | None:
        if not self._stands_anew or len(self._standing) < self._ranks:
            return None
        self._stands_anew = False
        return merge_standing([*self._standing.values()])

    def check(self) -> None:
        now = time.monotonic()
        if now - self._checked > WATCH_SECONDS:
            self._checked = now
            self._take(0)
            self._results.check_alike()
            self._check_health()

    def shutdown(self) -> None:
        """Idle ranks end by themselves. Those that may be waiting for one that is gone would not hear of it, and are killed."""
        idle = len(self._ready) == self._ranks and not self._results and not self._ordered
        end = time.monotonic()
        if idle and all(process.poll() is None for process in self._health.processes):
            end += STOP_SECONDS
            for rank in self._ready:
                with suppress(StarlingError):
                    self._send(rank, self._encode(Stop()))
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
        self._health.check_progress(stepping=bool(self._results), ordered=self._ordered)

    # ---- messages ----

    def _tell(self, message: ToWorker) -> None:
        encoded = self._encode(message)
        for rank in range(self._ranks):
            self._send(rank, encoded)

    def _send(self, rank: int, message: bytes) -> None:
        self._send_to(str(rank).encode(), rank, message)

    def _send_to(self, identity: bytes, rank: int, message: bytes) -> None:
        try:
            self._socket.send_multipart((identity, message))
        except zmq.ZMQError as error:
            self._take(0)  # a rank that has ended said why before it did
            self._health.check_alive(patience=1.0)
            raise RankLost(f"rank {rank} cannot be reached: {error}") from error

    def _take(self, timeout: float) -> None:
        """Takes all messages that are there; waits for the first one at most `timeout` seconds."""
        wait = math.ceil(timeout * 1000)
        while self._socket.poll(wait):
            identity, payload = self._socket.recv_multipart()
            self._handle(int(identity.rpartition(b"/")[2]), self._decode(payload))
            wait = 0

    def _handle(self, rank: int, message: FromWorker) -> None:
        match message:
            case Joined(host, store):
                self._join(rank, host, store)
            case Heartbeat():
                self._remote.take(rank, message)
            case WorkerPhase(phase, done, total):
                self._phases[rank] = Phase(phase, done, total)
            case MemoryPlanned(num_blocks):
                self._take_plan(rank, num_blocks)
            case WorkerReady():
                self._ready[rank] = message
            case Executed(result):
                self._results.take(rank, result)
            case MemoryOrderDone():
                self._rested[rank] = message
            case Prepared() | Unprepared() | Switched():
                self._take_answer(message)
            case Balance() | Rearranged():
                self._balances.append(message)
            case TransferChunks():
                self._movers.add(rank)
            case TransferDone():
                self._take_done(message)
            case TierStatus():
                self._standing[rank] = message
                self._stands_anew = True
            case WorkerFailed(kind, text):
                raise self._health.failure(rank, kind, text)

    def _join(self, rank: int, host: str, store: int) -> None:
        """When all are there they start together, for then they wait for each other only so long."""
        if len(self._joined) == self._ranks:
            raise RankLost(f"rank {rank} on {host} was started again")
        self._joined.add(rank)
        self._store = store or self._store
        if host:
            self._remote.join(rank, host)
        if len(self._joined) == self._ranks:
            for other in range(self._ranks):
                self._send(other, self._encode(Start(self._config_of(other))))

    def _take_plan(self, rank: int, num_blocks: int) -> None:
        self._planned[rank] = num_blocks
        if len(self._planned) == self._ranks:
            self._tell(Allocate(min(self._planned.values())))

    def _take_answer(self, answer: EpochAnswer) -> None:
        """One rank that cannot speaks for all; that they can, all have to say."""
        same = self._answered.setdefault((type(answer), answer.number), [])
        same.append(answer)
        if isinstance(answer, Unprepared) or len(same) == self._ranks:
            self._answers.append(_of_all(same) if isinstance(answer, Prepared) else answer)
            del self._answered[type(answer), answer.number]

    def _take_done(self, done: TransferDone) -> None:
        same = self._partly_done.setdefault(done.job, [])
        same.append(done)
        if len(same) == self._ranks:
            self._moved.append(merge(self._partly_done.pop(done.job)))

    def _config_of(self, rank: int) -> WorkerConfig:
        # Ranks that wait give up after the executor, which knows for whom.
        rendezvous = Rendezvous(self._address(0), self._store, self._address(rank), 2 * self._patience)
        return replace(self._config, rank=rank, rendezvous=rendezvous, counters=str(self._folder / "progress"))

    def _address(self, rank: int) -> str:
        return self._remote.host(rank) if rank in self._remote.ranks else self._host


def _of_all(answers: list[EpochAnswer]) -> Prepared:
    """What the ranks of the core say, as one: the slowest one's seconds, and what all have loaded."""
    each = [answer for answer in answers if isinstance(answer, Prepared)]
    return Prepared(each[0].number, max(answer.seconds for answer in each), merge_loaded(answer.loaded for answer in each))
