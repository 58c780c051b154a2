"""Snapshots of recurrent state: at which lengths of a sequence they are taken, and how they are found.

A prefix can be used up to a length at which there is a snapshot. One costs as much to copy as the state's part of a decode step,
and takes as many blocks as a state. So there are few of them: where a prompt ends, where several sequences part (the text that
prompts have in common), and spaced out over long prompts and outputs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from starling_engine.kv.hashing import HASH_BYTES
from starling_engine.kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class SnapshotSpacing:
    """Tokens between snapshots, rounded up to whole units: blocks, or chunks where there are tiers, which hold nothing in between.

    prompt  of a long prompt
    output  of an output; the last one is kept, so the next turn of a conversation computes so many at most
    least   that a snapshot of a prompt spares the next prompt that finds it: a prompt is cut for it, which costs a step
    unit    at least; 1 is a block
    """

    prompt: int = 8192
    output: int = 64
    least: int = 256
    unit: int = 1


@dataclass(slots=True)
class SequenceState:
    """The state of a running sequence, and its snapshots.

    blocks  of the state as it runs; none while the sequence waits
    stops   lengths at which prefill stops for a snapshot, ascending
    copied  snapshots that a planned step copies, or that come from a tier, by length: they are the sequence's until results of a
            step from there on are here; the former have no name before
    named   names of snapshots that the sequence added to the cache, by length
    found   name of the one that it began with
    """

    blocks: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    copied: dict[int, list[int]] = field(default_factory=dict)
    named: dict[int, bytes] = field(default_factory=dict)
    found: bytes | None = None

    @property
    def output_names(self) -> dict[int, bytes]:
        """Names of its snapshots that lie in its output, by length."""
        return {length: name for length, name in self.named.items() if length not in self.stops}


def prompt_stops(start: int, num_tokens: int, junction: int, block_size: int, spacing: SnapshotSpacing) -> list[int]:
    """Returns the lengths at which the prefill of tokens from `start` on stops for snapshots.

    `junction` is the length of a prefix from which several sequences go on. The last token is never part of a prefix.
    """
    unit = max(block_size, spacing.unit)
    end = (num_tokens - 1) // unit * unit
    every = -(-spacing.prompt // unit) * unit
    spaced = range((start // every + 1) * every, end, every)
    stops: list[int] = []
    for length in sorted({*spaced, junction // unit * unit, end}):
        if length - (stops[-1] if stops else start) >= spacing.least:
            stops.append(length)
    return stops


class SnapshotCache:
    """Snapshots in a pool, as blocks of the group `group`; each is `num_blocks` blocks with names of their own.

    The first block's name is that of the prefix, so that names of prefixes are looked up at once.
    """

    def __init__(self, pool: BlockPool, group: int, num_blocks: int) -> None:
        self._pool = pool
        self._group = group
        self._num_blocks = num_blocks

    def longest(self, hashes: list[bytes], limit: int) -> int:
        """Returns the largest number of blocks, at most `limit`, behind which there is a snapshot."""
        mask = self._pool.cached_mask(self._group, hashes[:limit])
        at = mask.rfind(b"\1")
        while at >= 0 and self.find(hashes[at]) is None:
            at = mask.rfind(b"\1", 0, at)
        return at + 1

    def find(self, name: bytes) -> list[int] | None:
        """Returns the blocks of a snapshot; None unless all are there."""
        blocks = [self._pool.find(self._group, each) for each in self._names(name)]
        found = [block for block in blocks if block is not None]
        return found if len(found) == self._num_blocks else None

    def along(self, hashes: list[bytes]) -> dict[int, bytes]:
        """Returns the names of a prefix's snapshots, by the block behind which each is."""
        mask = self._pool.cached_mask(self._group, hashes)
        return {at: hashes[at] for at, there in enumerate(mask) if there}

    def names(self) -> Iterator[bytes]:
        """Yields the names of all snapshots."""
        return (name for name in self._pool.cached(self._group) if len(name) == HASH_BYTES and self.find(name) is not None)

    def add(self, name: bytes, blocks: list[int]) -> bool:
        """Caches a snapshot. Returns False where there is one of the name already."""
        if self.find(name) is not None:
            return False
        self.evict(name)
        for each, block in zip(self._names(name), blocks, strict=True):
            self._pool.cache_block(self._group, each, block)
        return True

    def evict(self, name: bytes) -> None:
        """Evicts what is there of a snapshot."""
        for each in self._names(name):
            block = self._pool.find(self._group, each)
            if block is not None:
                self._pool.evict_block(block)

    def touch(self, name: bytes) -> None:
        """Lets a snapshot that nobody uses be taken as late as what is released now, unless it is spent."""
        for block in self.find(name) or ():
            self._pool.touch(block)

    def spend(self, name: bytes) -> None:
        """Lets a snapshot that nobody uses be taken first."""
        for block in self.find(name) or ():
            self._pool.spend(block)

    def _names(self, name: bytes) -> Iterable[bytes]:
        yield name
        for number in range(1, self._num_blocks):
            yield name + number.to_bytes(4, "big")
