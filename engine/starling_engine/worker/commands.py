"""Commands that a core gives its ranks besides steps, their replies, and the dispatch on a rank. Imports no torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from starling_engine.kv_offload.orders import TierStatus, TransferChunks, TransferDone
from starling_engine.sleep import MemoryReply, ReleaseMemory, RestoreMemory
from starling_engine.topology.epoch import Balance, EpochCommand, Prepared, Rearranged, Switched, Unprepared

if TYPE_CHECKING:
    from starling_engine.worker.worker import Worker


class Idle(msgspec.Struct, tag="idle"):
    """No plan follows the last one at once: the rank need not wait for it to step with other cores' ranks. Not answered."""


Command = Idle | TransferChunks | ReleaseMemory | RestoreMemory | EpochCommand

Reply = TransferDone | TierStatus | MemoryReply | Prepared | Unprepared | Switched | Balance | Rearranged
"""Message from a rank to its core: the answer to a command, or news that nobody asked for."""


class CommandHandler:
    """Dispatches commands on one rank; all come between steps. Transfers go to the worker beside them.

    `reply` gets the answers of the worker. `settle` waits until all launched steps are answered.
    """

    def __init__(self, worker: "Worker", reply: Callable[[Reply], None], settle: Callable[[], None] = lambda: None) -> None:
        self._worker = worker
        self._reply = reply
        self._settle = settle

    def handle(self, command: Command) -> None:
        match command:
            case ReleaseMemory() | RestoreMemory():
                self._settle()  # the core knows the results of the rank that samples; this one's may still be in flight
                self._reply(self._worker.change_memory(command))
            case _:
                raise AssertionError(f"{type(command).__name__} is for ranks that step with those of other cores")
