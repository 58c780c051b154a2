"""Interface of secondary tiers, which hold chunks outside this process: a folder, a store over the network.

A chunk is the keys and values of CHUNK tokens of a prefix in one KV group. The part of it that one rank holds, some layers and some
heads, is one object. Its layout knows neither block sizes nor ranks:

    [layers of the part][keys, values][heads of the part][CHUNK tokens][head_dim]     (latents: [layers][CHUNK tokens][latent])

A snapshot of a recurrent state is several chunks. One object is a rank's blocks of one of them, as they are; its part has the
rank's coordinates for layers and heads. It is of no use in another layout, so the fingerprint of such a model has the layout.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

CHUNK = 64
"""Tokens of a chunk: a whole number of blocks of every size."""

LOOKUP_SECONDS = 3.0
"""Longest wait of a request for the secondary tiers; a lookup answers after half of it, to leave time for what was found."""

Chunk = tuple[int, bytes]
"""KV group, and the block hash at the chunk's end."""


class ChunkPart(NamedTuple):
    """The part of a chunk that an object holds: layers by their index in the group, and KV heads; ends are exclusive."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


class ObjectKey(NamedTuple):
    """Key of an object. `name` is the prefix hash at the chunk's end (`kv.hashing`, 32 bytes): it stands for the whole prefix.

    A tier is opened with a fingerprint of all else that makes an object valid: model, revision, dtype.
    """

    name: bytes
    group: int
    part: ChunkPart


class TierError(Exception):
    """The tier cannot serve now: full, read-only, gone, too slow. Serving goes on without it."""


class ObjectMissing(Exception):
    """There is no such object, or it was damaged: then it has been dropped and counted."""


class TierCounters(msgspec.Struct, array_like=True):
    """Counters of a tier. `bytes` and `objects` are the whole tier's where it knows them, else 0; all others only grow."""

    bytes: int = 0
    objects: int = 0
    evicted: int = 0
    corrupt: int = 0
    """Objects that were damaged, cut off or foreign, and so were dropped."""
    errors: int = 0
    refused: int = 0
    """Operations that were not tried because the tier is out of order."""
    full: int = 0
    """Objects that were not written because there was no room for them."""


class SecondaryTier(Protocol):
    """Several threads call a tier at once. None of its calls may wait without bound."""

    name: str
    """The tier in metrics and logs: filesystem, store."""

    @property
    def counters(self) -> TierCounters: ...

    @property
    def cpu_elsewhere(self) -> float:
        """Processor time in seconds of the tier's own threads and processes; may start again from 0."""
        ...

    def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Returns for each key whether there is an object, as a hint. All keys share one time limit. Raises TierError."""
        ...

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Fills `into`, which has the object's size, with what was written. Raises ObjectMissing or TierError."""
        ...

    def write(self, key: ObjectKey, data: memoryview) -> None:
        """Writes an object; one of that key that is there already stays. Raises TierError."""
        ...

    def close(self) -> None: ...
