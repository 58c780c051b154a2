"""A worker as a process: one rank of several. It connects to its executor, and lives as long as its parent."""

import logging
import os
import sys
import traceback
from pathlib import Path

import msgspec
import zmq

from starling_engine.errors import ConfigError, RankLost
from starling_engine.ipc.child import die_with_parent, live_with_parent
from starling_engine.ipc.collection import freeze_heap
from starling_engine.parallel.gloo import serve_store
from starling_engine.worker.counters import ProgressCount, ProgressCounters
from starling_engine.worker.messages import (
    Allocate,
    FromWorker,
    Joined,
    MemoryPlanned,
    Phase,
    Start,
    ToWorker,
    WorkerFailed,
    WorkerPhase,
    WorkerReady,
    result_identity,
    worker_identity,
)
from starling_engine.worker.process.dp_sync_loop import DpSyncLoop
from starling_engine.worker.process.plan_loop import PlanLoop
from starling_engine.worker.process.sockets import HeartbeatSender, PlanSocket, TransferSocket, connect
from starling_engine.worker.worker import Worker

logger = logging.getLogger("starling.worker")

SEND_MS = 500
"""Time, at the end, for messages that are still to be sent."""
LOOPBACK = "127.0.0.1"
STORE_SECONDS = 10.0
"""Time in which the store has to answer the rank that serves it."""


class WorkerProcess:
    """Serves one executor at `address` (a ZeroMQ endpoint) as `rank`; from another node with `host`, this node's address."""

    def __init__(self, address: str, rank: int, host: str = "") -> None:
        self._rank = rank
        self._host = host
        self._address = address
        self._counters: ProgressCounters | None = None
        if host:
            HeartbeatSender(address, rank, self._count)
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._socket = self._connect(worker_identity(rank))
        self._encode = msgspec.msgpack.Encoder().encode

    def run(self) -> None:
        """Runs until the executor sends Stop. Raises any error that leaves the worker useless. Rank 0 serves the ranks' store."""
        # Here rather than in the executor, whose process then needs no torch.
        store = serve_store(self._host or LOOPBACK, STORE_SECONDS) if self._rank == 0 else None
        self._send(Joined(self._host, store.port if store is not None else 0))
        start = self._receive()
        assert isinstance(start, Start), "Start comes first"
        config = start.config
        # A file of the executor's node is not on another one.
        counters = ProgressCounters(None if self._host else Path(config.counters), config.layout.world_size)
        self._counters = counters
        transfers = TransferSocket(self._address, self._rank) if config.tiers is not None else None
        reply = transfers.reply if transfers is not None else None
        plans = PlanSocket(self._socket)
        worker = Worker(config, lambda: counters.tick(self._rank), self._report_phase, self._agree, reply, plans)
        report = worker.prepare()
        loop = self._make_loop(worker, plans, counters, dp_sync=config.dp_sync)
        if transfers is not None:
            transfers.serve(worker.transfer)
        seconds = report.seconds[0]
        freeze_heap()
        self._send(WorkerReady(report.ledger, seconds, report.async_scheduling, report.step_target_ms, report.makes_drafts))
        loop.run()
        worker.close()

    def fail(self, error: Exception) -> None:
        """Reports the error that ends this worker."""
        self._send(WorkerFailed(type(error).__name__, str(error)))

    def close(self) -> None:
        """Waits until all messages are sent."""
        zmq.Context.instance().destroy(SEND_MS)

    def _make_loop(self, worker: Worker, plans: PlanSocket, counters: ProgressCounters, *, dp_sync: bool) -> DpSyncLoop | PlanLoop:
        if dp_sync:
            return DpSyncLoop(worker, plans, self._send, counters, self._rank)
        results = self._connect(result_identity(self._rank))
        return PlanLoop(worker, plans, results, self._send, counters, self._rank)

    def _connect(self, identity: bytes) -> "zmq.Socket[bytes]":
        return connect(zmq.Context.instance(), self._address, identity, SEND_MS)

    def _count(self) -> ProgressCount:
        return self._counters.read()[self._rank] if self._counters is not None else ProgressCount(0, 0, 0)

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
    except Exception as error:  # noqa: BLE001 - whatever it is, the executor is sent it
        if not isinstance(error, RankLost | ConfigError):  # these say all in their messages
            logger.error("rank %s ends:\n%s", sys.argv[2], traceback.format_exc())
        process.fail(error)
        process.close()
        os._exit(3)
    process.close()
    os._exit(0)
