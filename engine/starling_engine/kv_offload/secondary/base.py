"""The seam to what keeps chunks of the cache outside this process: a folder, a store over the network.

A chunk is the keys and values of CHUNK tokens of a prefix in one KV group. What one rank holds of it, some layers and some heads,
is one object, in a layout that knows neither block sizes nor ranks:

    [layers of the part][keys, values][heads of the part][CHUNK tokens][head_dim]     (latents: [layers][CHUNK tokens][latent])
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

CHUNK = 64
"""Tokens of a chunk: a whole number of blocks of every size."""


class ChunkPart(NamedTuple):
    """What of a chunk an object holds: layers by their place in the group, and KV heads, each from the first to before the end."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


class ObjectKey(NamedTuple):
    """Name of an object. `name` is the chain's value at the chunk's end (`kv.hashing`, 32 bytes): it stands for the whole prefix.

    What else makes it valid (model, revision, dtype) is the tier's own business: it is opened with a fingerprint of that.
    """

    name: bytes
    group: int
    part: ChunkPart


class TierError(Exception):
    """The tier is of no use now: full, read-only, gone, too slow. Serving goes on without it."""


class ObjectMissing(Exception):
    """There is no such object; or there was one that could not be trusted, and it has been dropped and counted."""


class TierCounters(msgspec.Struct, array_like=True):
    """What a tier holds and did. `bytes` and `objects` are of the whole tier where it knows them, else 0; the rest only grows."""

    bytes: int = 0
    objects: int = 0
    evicted: int = 0
    corrupt: int = 0
    """Objects that were damaged, cut off or foreign, and so were dropped."""
    errors: int = 0
    refused: int = 0
    """Operations that were not tried because the tier is out of order."""
    full: int = 0
    """Objects that were not taken because there was no room for them."""


class SecondaryTier(Protocol):
    """Called by several threads at once. None of its calls may wait without bound."""

    name: str
    """Of the tier in metrics and logs: filesystem, store."""

    @property
    def counters(self) -> TierCounters: ...

    @property
    def cpu_elsewhere(self) -> float:
        """Processor time in seconds that it has taken besides the threads that call it; may begin anew."""
        ...

    def find(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether there is an object, for each key, of few chunks: they have one time limit. A hint. Raises FarError."""
        ...

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Fills `into`, exactly the object's bytes, with what was written and has been checked. Raises Missing or FarError."""
        ...

    def write(self, key: ObjectKey, data: memoryview) -> None:
        """Keeps the object; one of that name that is there already stays. Raises FarError."""
        ...

    def close(self) -> None:
        """Ends what goes on in the background."""
        ...
