"""Messages between frontends and engine cores: msgpack over ZeroMQ, never pickle."""

from typing import NamedTuple, Self

import msgspec

from starling_engine.delta import Delta, Stats
from starling_engine.kv.changes import CacheChanges
from starling_engine.ledger import Ledger
from starling_engine.request import EngineRequest
from starling_engine.sleep import SleepCommand, SleepState, Slept
from starling_engine.token_packing import ID_BYTES, pack_tokens, unpack_tokens
from starling_engine.topology.epoch import EpochCommand, EpochReply, Rearranged
from starling_engine.topology.layout import EpochMembership


class Add(msgspec.Struct, tag="add"):
    """A request whose tokens are sent packed (`tokens`) beside it; `of` packs and `unpacked` unpacks."""

    request: EngineRequest
    prompt: bytes
    output: bytes
    prediction: bytes = b""

    def __post_init__(self) -> None:
        if any(len(tokens) % ID_BYTES for tokens in (self.prompt, self.output, self.prediction)):
            raise ValueError("no whole number of tokens")

    @classmethod
    def of(cls, request: EngineRequest) -> Self:
        bare = msgspec.structs.replace(request, prompt_ids=[], output_ids=[], prediction_ids=[])
        return cls(bare, *map(pack_tokens, (request.prompt_ids, request.output_ids, request.prediction_ids)))

    def unpacked(self) -> EngineRequest:
        return msgspec.structs.replace(
            self.request,
            prompt_ids=unpack_tokens(self.prompt),
            output_ids=unpack_tokens(self.output).tolist(),
            prediction_ids=unpack_tokens(self.prediction),
        )


class Abort(msgspec.Struct, tag="abort"):
    """Ends requests of this frontend; their blocks are free by the next step. No answer is sent for them."""

    ids: list[str]


class Ping(msgspec.Struct, tag="ping"):
    """Sign of life of a frontend; the core answers with Pong at once, also while a step runs."""


class ShutdownCore(msgspec.Struct, tag="shutdown"):
    """The frontend that started the core asks it to end."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forgets every cached block that no request uses."""


CoreCommand = EpochCommand | SleepCommand
CoreReply = EpochReply | Slept


class FollowCache(msgspec.Struct, tag="follow"):
    """Asks for all that the core has cached, and from now on for what changes. `listener` is new among those of the frontend."""

    listener: int


class LeaveCache(msgspec.Struct, tag="leave"):
    """Ends following: nobody at this frontend wants to be told any more."""


class Call(msgspec.Struct, tag="call"):
    """A command, with a number that is new among those of the frontend."""

    id: int
    command: CoreCommand


class Answer(msgspec.Struct, tag="answer"):
    """The reply to the Call of this number, once the core's ranks have carried it out or could not."""

    id: int
    reply: CoreReply


FromFrontend = Add | Abort | Ping | ShutdownCore | ResetPrefixCache | FollowCache | LeaveCache | Call


class Deltas(msgspec.Struct, tag="deltas"):
    deltas: list[Delta]
    stats: Stats


class Hello(msgspec.Struct, tag="hello"):
    """First answer to a frontend's first Ping: the core's identity, its ranks, and how much it can hold.

    `max_tokens` is the longest sequence that the KV cache can hold; a request is bounded by the model's length too. `store` is the
    port of the store that the core's rank 0 serves, where ranks of several cores can meet; 0 for none. `taking`: the core takes
    requests, as one that shares experts does while it is in an epoch, unless it sleeps (`sleep`). Frontends of other nodes reach it
    at `address`; empty where it listens for its own node only. `start_seconds` has the seconds of each step of each rank's start.
    """

    incarnation: str
    max_tokens_per_request: int
    max_tokens: int
    membership: EpochMembership
    store: int
    ledger: Ledger
    stats: Stats
    taking: bool
    address: str = ""
    start_seconds: list[dict[str, float]] = []
    sleep: SleepState = SleepState()


class Pong(msgspec.Struct, tag="pong"):
    """`progress` grows with every layer that a worker finishes; `busy` is True while it should."""

    incarnation: str
    progress: int
    busy: bool
    stats: Stats


class Loading(msgspec.Struct, tag="loading"):
    """The core is not ready yet: it is in `phase`, at `done` of `total` bytes where that is known.

    Ranks on other nodes have to join at `joining`; empty where there are none.
    """

    phase: str
    done: int = 0
    total: int = 0
    joining: str = ""


class EpochNotice(msgspec.Struct, tag="epoch"):
    """The core is in another epoch than it was, or leaves it. A core that is in none takes no request."""

    membership: EpochMembership
    taking: bool


class CacheNotice(msgspec.Struct, tag="cache"):
    """Tells what is cached: to one listener of a frontend, or (0) to all that have been told all."""

    changes: CacheChanges
    listener: int = 0


FromCore = Deltas | Hello | Pong | Loading | Answer | EpochNotice | SleepState | Rearranged | CacheNotice


# ---- messages of a core, which its process sends ----

Notice = EpochNotice | SleepState | Rearranged
"""Message to all frontends."""


class FrontendCall(NamedTuple):
    """A frontend that waits for an answer: its identity, and its number for the command."""

    frontend: bytes
    call: int


class Outgoing(NamedTuple):
    """`frontend` is None for a notice, which all get."""

    frontend: bytes | None
    message: Answer | Notice | CacheNotice


class Outbox:
    """Messages that a core's process is to send, in order: all frontends know of a change before its caller has the answer."""

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []

    def notify(self, notice: Notice) -> None:
        self._messages.append(Outgoing(None, notice))

    def answer(self, caller: FrontendCall, reply: CoreReply) -> None:
        self._messages.append(Outgoing(caller.frontend, Answer(caller.call, reply)))

    def send(self, frontend: bytes, notice: CacheNotice) -> None:
        self._messages.append(Outgoing(frontend, notice))

    def take(self) -> list[Outgoing]:
        messages, self._messages = self._messages, []
        return messages
