"""Commands that a core gives its ranks besides steps, their replies, and the dispatch on a rank. Imports no torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from starling_engine.kv_offload.orders import TierStatus, TransferChunks, TransferDone
from starling_engine.sleep import MemoryOrderDone, ReleaseMemory, RestoreMemory
from starling_engine.topology.epoch import (
    Abandon,
    Balance,
    Commit,
    EpochPlan,
    Prepare,
    Prepared,
    Rearranged,
    Switched,
    Unprepared,
)

if TYPE_CHECKING:
    from starling_engine.worker.worker import Worker


class Idle(msgspec.Struct, tag="idle"):
    """No plan follows the last one at once: the rank need not wait for it to step with other cores' ranks. Not answered."""


Command = Idle | TransferChunks | ReleaseMemory | RestoreMemory | Prepare | Commit | Abandon

Reply = TransferDone | TierStatus | MemoryOrderDone | Prepared | Unprepared | Switched | Balance | Rearranged
"""Message from a rank to its core: the answer to a command, or news that nobody asked for."""


class EpochMember(Protocol):
    """A rank that steps with those of other cores, and changes epochs with them."""

    def prepare(self, plan: EpochPlan) -> None: ...

    def commit(self, number: int) -> None: ...

    def abandon(self) -> None: ...

    def idle(self) -> None: ...


class CommandHandler:
    """Dispatches commands on one rank; all come between steps. Transfers go to the worker beside them.

    `reply` gets the answers of the worker; `epochs` sends its own. `settle` waits until all launched steps are answered.
    """

    def __init__(
        self,
        worker: "Worker",
        reply: Callable[[Reply], None],
        settle: Callable[[], None] = lambda: None,
        epochs: EpochMember | None = None,
    ) -> None:
        self._worker = worker
        self._reply = reply
        self._settle = settle
        self._epochs = epochs

    def handle(self, command: Command) -> None:
        match command:
            case ReleaseMemory() | RestoreMemory():
                self._settle()  # the core knows the results of the rank that samples; this one's may still be in flight
                self._reply(self._worker.order_memory(command))
            case Idle():
                self._among_cores.idle()
            case Prepare(epoch):
                self._among_cores.prepare(epoch)
            case Commit(number):
                self._among_cores.commit(number)
            case Abandon():
                self._among_cores.abandon()

    @property
    def _among_cores(self) -> EpochMember:
        assert self._epochs is not None, "this command is for cores that step with others"
        return self._epochs
