"""What a tier and its helper say to each other: msgpack in packets of a Unix socket, values in memory that both map.

The order: Setup; Imported or Unusable; Ready or Failed; then calls and answers, in any order.
"""

from typing import Literal

import msgspec

LATE = -1
"""Code of a call that was not made, because nobody waits for it any more."""
NO_ROOM = -200
TOO_LARGE = -600
"""The value in the store is larger than the buffer it was to go to."""
NOT_FOUND = -704
TRANSFER_FAILED = -800
"""The memory that holds the value cannot be reached."""
MASTER_UNREACHABLE = -900

PACKET = 1 << 17
"""No packet is larger; less than what a socket's buffer takes at least."""


class Setup(msgspec.Struct, tag="setup"):
    """`memory` bytes are in the file that the helper inherits, mapped by both; the rest as in `StoreAddress`."""

    host: str | None
    metadata: str
    segment: int
    memory: int
    master: str
    port: int


class StoreCall(msgspec.Struct, tag="call"):
    """Of a "get" or "put" there is one key, and `size` bytes from `offset` of the memory. `deadline` is by the monotonic clock."""

    id: int
    what: Literal["find", "get", "put", "drop"]
    keys: list[str]
    deadline: float
    offset: int = 0
    size: int = 0


class Imported(msgspec.Struct, tag="imported"):
    """The library is there; what follows needs the store."""


class Unusable(msgspec.Struct, tag="unusable"):
    """The library cannot be loaded."""

    reason: str


class StoreReady(msgspec.Struct, tag="ready"):
    """Calls are taken."""


class StoreFailed(msgspec.Struct, tag="failed"):
    """The store did not take this client."""

    reason: str


class StoreAnswer(msgspec.Struct, tag="answer"):
    """A code for each key: of "find" 1 or 0, of "get" the bytes that were read, of "put" and "drop" 0; below 0 an error."""

    id: int
    codes: list[int]


FromHelper = Imported | Unusable | StoreReady | StoreFailed | StoreAnswer
ToHelper = Setup | StoreCall
