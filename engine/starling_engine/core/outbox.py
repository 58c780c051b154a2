"""Messages from a core to its frontends, that its process is to send."""

from typing import NamedTuple

from starling_engine.core.messages import Answer, CoreReply, EpochNotice
from starling_engine.sleep import SleepState
from starling_engine.topology.epoch import Rearranged

Notice = EpochNotice | SleepState | Rearranged
"""Message to all frontends."""


class FrontendCall(NamedTuple):
    """A frontend that waits for an answer: its identity, and its number for the command."""

    frontend: bytes
    call: int


class Outgoing(NamedTuple):
    """`frontend` is None for a notice, which all get."""

    frontend: bytes | None
    message: Answer | Notice


class Outbox:
    """Keeps the order of messages: all frontends know of a change before the caller has its answer."""

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []

    def notify(self, notice: Notice) -> None:
        self._messages.append(Outgoing(None, notice))

    def answer(self, caller: FrontendCall, reply: CoreReply) -> None:
        self._messages.append(Outgoing(caller.frontend, Answer(caller.call, reply)))

    def take(self) -> list[Outgoing]:
        messages, self._messages = self._messages, []
        return messages
