"""A worker as a process of its own: one rank of several. It speaks with its executor and lives as long as its parent."""

import logging
import os
import sys
import time
import traceback
from pathlib import Path

import msgspec
import zmq

from starling_engine.errors import RankLost
from starling_engine.ipc.child import die_with_parent, live_with_parent
from starling_engine.parallel.gloo import serve_store
from starling_engine.sleep import ReleaseMemory, RestoreMemory
from starling_engine.step import StepResult
from starling_engine.worker.counters import ProgressCount, ProgressCounters
from starling_engine.worker.messages import (
    Allocate,
    Execute,
    Executed,
    FromWorker,
    Joined,
    MemoryPlanned,
    Start,
    Stop,
    ToWorker,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    answer_identity,
)
from starling_engine.worker.process.chunk_transfers import MoveSocket
from starling_engine.worker.process.dealer import connect
from starling_engine.worker.process.dp_sync_loop import DpSyncLoop
from starling_engine.worker.process.heartbeat import HeartbeatSender
from starling_engine.worker.report import Phase
from starling_engine.worker.result_pump import ResultPump
from starling_engine.worker.worker import Worker

logger = logging.getLogger("starling.worker")

SEND_MS = 500
"""Given at the end to what is still to be sent."""
LOOPBACK = "127.0.0.1"
WATCH_MS = 200
"""How often a rank without a plan looks whether its device has failed."""
CLOSE_SECONDS = 5.0
HEARD_SECONDS = 0.5
"""In which a word that was sent has come, on busy cores too."""
STORE_SECONDS = 10.0
"""In which the store has to answer the rank that serves it."""


class WorkerProcess:
    """Answers one executor at `address` (a ZeroMQ endpoint) as `rank`; from another node with `host`, this node's address."""

    def __init__(self, address: str, rank: int, host: str = "") -> None:
        self._rank = rank
        self._host = host
        self._address = address
        self._counters: ProgressCounters | None = None
        if host:
            HeartbeatSender(address, rank, self._count)
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._socket = connect(zmq.Context.instance(), address, str(rank).encode(), SEND_MS)
        self._encode = msgspec.msgpack.Encoder().encode

    def run(self) -> None:
        """Until the executor says Stop. Raises what made the worker useless. Rank 0 serves the ranks' store meanwhile."""
        # Here rather than in the executor, whose process then needs no torch.
        store = serve_store(self._host or LOOPBACK, STORE_SECONDS) if self._rank == 0 else None
        self._send(Joined(self._host, store.port if store is not None else 0))
        start = self._receive()
        assert isinstance(start, Start), "Start comes first"
        config = start.config
        # A file of the executor's node is of no use on another one.
        counters = ProgressCounters(None if self._host else Path(config.counters), config.layout.world_size)
        self._counters = counters
        moves = MoveSocket(self._address, self._rank) if config.tiers is not None else None
        answer = moves.answer if moves is not None else None
        worker = Worker(config, lambda: counters.tick(self._rank), self._report_phase, self._agree, answer)
        report = worker.prepare()
        if moves is not None and worker.transfers is not None:
            moves.serve(worker.transfers)
        self._send(WorkerReady(report.ledger, report.seconds[0], report.async_scheduling, report.step_target_ms))
        if config.lockstep:
            DpSyncLoop(worker, self._socket, self._decode, self._send, counters, self._rank).run()
        else:
            self._execute_plans(worker, counters)
        if worker.transfers is not None:
            worker.transfers.close()

    def _execute_plans(self, worker: Worker, counters: ProgressCounters) -> None:
        """Results go by a socket of their own: a thread may have to wait for them, while this one waits for plans."""
        results = connect(zmq.Context.instance(), self._address, answer_identity(self._rank), SEND_MS)
        encode = msgspec.msgpack.Encoder().encode
        failures: list[BaseException] = []

        def answer(result: StepResult) -> None:
            if worker.samples or result.error is not None:
                results.send(encode(Executed(result)))
            counters.finish_step(self._rank)

        answering = ResultPump(answer, failures.append)
        while not isinstance(message := self._next_plan(failures), Stop):
            if isinstance(message, ReleaseMemory | RestoreMemory):
                answering.settle()  # the executor knows the results of the rank that samples; this one's may still be on their way
                self._send(worker.rest(message))
                continue
            assert isinstance(message, Execute)
            attempt = worker.begin(message.plan)
            answering.add(attempt)
            if attempt.failed:
                # The next step's exchanges may be matched with those of this one: its executor has to hear of it before.
                answering.settle()
                time.sleep(HEARD_SECONDS)
        answering.close(CLOSE_SECONDS)

    def _next_plan(self, failures: list[BaseException]) -> ToWorker:
        """Or another message; raises what has failed meanwhile."""
        while not self._socket.poll(WATCH_MS):
            if failures:
                raise failures[0]
        return self._receive()

    def _count(self) -> ProgressCount:
        return self._counters.read()[self._rank] if self._counters is not None else ProgressCount(0, 0, 0)

    def fail(self, error: Exception) -> None:
        """The last word."""
        self._send(WorkerFailed(type(error).__name__, str(error)))

    def close(self) -> None:
        """Waits until what was sent is gone."""
        zmq.Context.instance().destroy(SEND_MS)

    def _agree(self, num_blocks: int) -> int:
        """Waits for the slowest rank to have loaded."""
        self._send(MemoryPlanned(num_blocks))
        answer = self._receive()
        assert isinstance(answer, Allocate), "Allocate comes next"
        return answer.num_blocks

    def _report_phase(self, phase: Phase) -> None:
        self._send(WorkerPhase(phase.name, phase.done, phase.total))

    def _send(self, message: FromWorker) -> None:
        self._socket.send(self._encode(message))

    def _receive(self) -> ToWorker:
        message: ToWorker = self._decode(self._socket.recv())
        return message


def main() -> None:
    """`python -m starling_engine.worker ADDRESS RANK [HOST]`."""
    live_with_parent()
    die_with_parent()
    process = WorkerProcess(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    try:
        process.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the executor hears of it
        if not isinstance(error, RankLost):
            logger.error("rank %s ends:\n%s", sys.argv[2], traceback.format_exc())
        process.fail(error)
        process.close()
        os._exit(3)
    process.close()
    os._exit(0)
