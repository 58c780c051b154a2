"""Makes the next epoch ready beside the one that serves."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import zmq

from starling_engine.expert_parallel.dp_sync import Epoch
from starling_engine.platforms.priority import lower_priority
from starling_engine.topology.epoch import EpochPlan


@dataclass(slots=True)
class EpochPreparation:
    """`epoch` is None for a rank that leaves, or where `error` says why there is none."""

    plan: EpochPlan
    cancelled: bool = False
    epoch: Epoch | None = None
    seconds: float = 0.0
    error: str | None = None


Make = Callable[[EpochPlan, Callable[[], bool]], Epoch | None]
"""Called with the plan, and with what says whether it is still wanted."""


class EpochPreparer:
    """Each preparation runs in a thread; the worker's own takes what came of it. `socket` is readable when there is something."""

    ADDRESS = "inproc://prepared"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], make: Make) -> None:
        self._context = context
        self._make = make
        self._current: EpochPreparation | None = None
        self._made: SimpleQueue[EpochPreparation] = SimpleQueue()
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(self.ADDRESS)

    def start(self, plan: EpochPlan) -> None:
        """Takes the place of one that is under way."""
        self.cancel()
        self._current = EpochPreparation(plan)
        threading.Thread(target=self._run, args=(self._current,), name=f"epoch-{plan.number}", daemon=True).start()

    def cancel(self) -> None:
        if self._current is not None:
            self._current.cancelled = True
            self._current = None

    def take(self) -> EpochPreparation | None:
        """What has been made, if it is still wanted."""
        wanted = None
        while self.socket.poll(0):
            self.socket.recv()
            made = self._made.get()
            if made is self._current:
                wanted, self._current = made, None
            elif made.epoch is not None:
                made.epoch.close()
        return wanted

    def _run(self, preparation: EpochPreparation) -> None:
        lower_priority()
        began = time.monotonic()
        try:
            preparation.epoch = self._make(preparation.plan, lambda: preparation.cancelled)
        except Exception as error:  # noqa: BLE001 - whatever it is, the epoch that serves goes on
            preparation.error = f"{type(error).__name__}: {error}"
        preparation.seconds = time.monotonic() - began
        self._made.put(preparation)
        bell = self._context.socket(zmq.PUSH)
        bell.connect(self.ADDRESS)
        bell.send(b"")
        bell.close()
