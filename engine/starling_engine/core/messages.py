"""Messages between frontends and engine cores: msgpack over ZeroMQ, never pickle."""

from typing import Self

import msgspec

from starling_engine.delta import Delta, Stats
from starling_engine.ledger import Ledger
from starling_engine.request import EngineRequest
from starling_engine.sleep import Sleep, SleepState, Slept, WakeUp
from starling_engine.tokens import ID_BYTES, pack, unpack
from starling_engine.topology.epoch import EpochAnswer, EpochOrder, Rearranged
from starling_engine.topology.layout import EpochMembership


class Add(msgspec.Struct, tag="add"):
    """A request whose tokens travel packed (`tokens`) beside it; `of` and `unpacked` are the two ends."""

    request: EngineRequest
    prompt: bytes
    output: bytes

    def __post_init__(self) -> None:
        if len(self.prompt) % ID_BYTES or len(self.output) % ID_BYTES:
            raise ValueError("no whole number of tokens")

    @classmethod
    def of(cls, request: EngineRequest) -> Self:
        bare = msgspec.structs.replace(request, prompt_ids=[], output_ids=[])
        return cls(bare, pack(request.prompt_ids), pack(request.output_ids))

    def unpacked(self) -> EngineRequest:
        return msgspec.structs.replace(self.request, prompt_ids=unpack(self.prompt), output_ids=unpack(self.output).tolist())


class Abort(msgspec.Struct, tag="abort"):
    """Ends requests of this frontend; their blocks are free by the next step. No answer is sent for them."""

    ids: list[str]


class Ping(msgspec.Struct, tag="ping"):
    """A frontend says that it is there; the core answers with Pong at once, also while a step runs."""


class ShutdownCore(msgspec.Struct, tag="shutdown"):
    """The frontend that started the core asks it to end."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forgets every cached block that no request uses."""


FromFrontend = Add | Abort | Ping | ShutdownCore | ResetPrefixCache | Sleep | WakeUp | EpochOrder


class Deltas(msgspec.Struct, tag="deltas"):
    deltas: list[Delta]
    stats: Stats


class Hello(msgspec.Struct, tag="hello"):
    """First answer to a frontend's first Ping: who the core is, with which workers, and what it can hold.

    `max_tokens` is the longest sequence that the KV cache can hold; a request is bounded by the model's length too. `store` is the
    port of the store that the core's rank 0 serves, where ranks of several cores can meet; 0 for none. `taking`: whether it takes
    requests, which one that shares experts does while it is in an epoch; `sleep` may keep it from them then. `address` is where
    frontends of other nodes reach it; empty where it listens for those of its own node only. `start_seconds` is how long each step
    of each rank's start took, by rank.
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
    """`progress` grows with every layer that a worker finishes; `busy` says whether it should."""

    incarnation: str
    progress: int
    busy: bool
    stats: Stats


class Loading(msgspec.Struct, tag="loading"):
    """The core is not ready yet: it is in `phase`, and has done `done` of `total` bytes where that is known.

    `joining` is where ranks on other nodes have to join; empty where there are none.
    """

    phase: str
    done: int = 0
    total: int = 0
    joining: str = ""


class EpochNotice(msgspec.Struct, tag="member"):
    """The core is in another epoch than it was, or leaves it. One that is in none takes no request."""

    membership: EpochMembership
    taking: bool


FromCore = Deltas | Hello | Pong | Loading | EpochNotice | SleepState | Slept | Rearranged | EpochAnswer
