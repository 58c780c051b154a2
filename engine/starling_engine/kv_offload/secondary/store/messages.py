"""Messages between a tier and its helper: msgpack in packets of a Unix socket, values in memory that both map.

The order: Setup; Imported; Joined; then calls and answers, in any order.
"""

from enum import IntEnum
from typing import Literal

import msgspec

PACKET = 1 << 17
"""Bytes of the largest packet; less than what a socket's buffer takes at least."""


class Code(IntEnum):
    """Answers below 0: the library's, and LATE for a call that was not made because nobody waits for it any more."""

    LATE = -1
    NO_ROOM = -200
    TOO_LARGE = -600
    """The value in the store is larger than the buffer for it."""
    NOT_FOUND = -704
    MASTER_UNREACHABLE = -900


class Setup(msgspec.Struct, tag="setup"):
    """First message to the helper. `memory` is the size of the file that it inherits; all else is as in `StoreAddress`."""

    host: str | None
    metadata: str
    segment: int
    memory: int
    master: str
    port: int


class StoreCall(msgspec.Struct, tag="call"):
    """A call to the store. A "get" or "put" has one key, and `size` bytes from `offset` of the memory.

    `deadline` is by the monotonic clock.
    """

    id: int
    what: Literal["find", "get", "put", "drop"]
    keys: list[str]
    deadline: float
    offset: int = 0
    size: int = 0


class Imported(msgspec.Struct, tag="imported"):
    """The library has been loaded, or cannot be."""

    error: str | None = None


class StoreJoined(msgspec.Struct, tag="joined"):
    """The store has accepted this client, so that calls may follow, or has not."""

    error: str | None = None


class StoreAnswer(msgspec.Struct, tag="answer"):
    """A code for each key: 1 or 0 of "find", the bytes read of "get", 0 of "put" and "drop"; a `Code` for an error."""

    id: int
    codes: list[int]


FromHelper = Imported | StoreJoined | StoreAnswer
ToHelper = Setup | StoreCall
