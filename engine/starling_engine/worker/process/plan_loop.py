"""The loop of a worker that steps with the ranks of its own core alone."""

import time
from collections.abc import Callable

import msgspec
import zmq

from starling_engine.step import StepResult
from starling_engine.worker.commands import CommandHandler, Reply
from starling_engine.worker.counters import ProgressCounters
from starling_engine.worker.messages import Execute, Executed, PlanMessage, Stop
from starling_engine.worker.process.sockets import PlanSocket
from starling_engine.worker.result_pump import ResultPump
from starling_engine.worker.worker import Worker

WATCH_MS = 200
"""Time between two looks of a rank without a plan whether its device has failed."""
CLOSE_SECONDS = 5.0
ARRIVAL_SECONDS = 0.5
"""Time in which a message that was sent has arrived, on busy cores too."""


class PlanLoop:
    """Receives plans from `socket`; results go by `results`: a thread may wait for them while this one waits for plans.

    `send` sends replies to commands. `counters` count progress as `rank`'s.
    """

    def __init__(
        self,
        worker: Worker,
        socket: PlanSocket,
        results: "zmq.Socket[bytes]",
        send: Callable[[Reply], None],
        counters: ProgressCounters,
        rank: int,
    ) -> None:
        self._worker = worker
        self._socket = socket
        self._results = results
        self._counters = counters
        self._rank = rank
        self._failures: list[BaseException] = []
        self._pump = ResultPump(self._send_result, self._failures.append)
        self._commands = CommandHandler(worker, send, self._pump.settle)
        self._encode = msgspec.msgpack.Encoder().encode

    def run(self) -> None:
        """Runs until Stop. Raises the error that ended the device."""
        while not isinstance(message := self._receive(), Stop):
            if isinstance(message, Execute):
                self._execute(message)
            else:
                self._commands.handle(message)
        self._pump.close(CLOSE_SECONDS)

    def _execute(self, message: Execute) -> None:
        step = self._worker.begin(message.plan)
        self._pump.add(step)
        if step.failed:
            # The next step's exchanges may be matched with those of this one: its executor has to know of it before.
            self._pump.settle()
            time.sleep(ARRIVAL_SECONDS)

    def _send_result(self, result: StepResult) -> None:
        if self._worker.samples or result.error is not None:
            self._results.send(self._encode(Executed(result)))
        self._counters.finish_step(self._rank)

    def _receive(self) -> PlanMessage:
        while (message := self._socket.next(WATCH_MS)) is None:
            if self._failures:
                raise self._failures[0]
        return message
