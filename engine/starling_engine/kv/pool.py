"""The pool of blocks that all KV groups share: reference counts, an LRU free list, and the hashes of cached blocks."""

from collections import OrderedDict
from collections.abc import Collection
from itertools import takewhile

from starling_engine.kv.events import EventLog

NULL_BLOCK = 0
"""Entry of block tables for a block that is not needed any more. Never written for a request, never read."""


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than are wanted; nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class BlockPool:
    """Blocks 1 .. num_blocks - 1 by number. All operations are O(1) a block.

    A block without a reference is free. Free blocks stay cached by hash until they are taken, least recently freed first.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_blank = num_blocks - 1
        """Free blocks that are not cached: taking them loses nothing."""
        self._hash_of: list[tuple[int, bytes] | None] = [None] * num_blocks
        self.version = 0
        """Grows with each change of the cache: search results hold while it stays the same."""
        self._events = EventLog((), published=False) if events is None else events
        self._cached: list[dict[bytes, int]] = [{} for _ in range(num_groups)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` free blocks, each with one reference. Raises OutOfBlocks."""
        free = self._free
        if count > len(free):
            raise OutOfBlocks(count, len(free))
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.refs[block] = 1
            self.num_blank -= self._hash_of[block] is None
            self._evict(block)
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a block that is in use or cached."""
        if self.refs[block] == 0:
            del self._free[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Drops one reference; without any the block is free, and taken last if it is cached, else first.

        Nobody can find a block that is not cached, and its memory is warm.
        """
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)
                self.num_blank += 1
        assert self.refs[block] >= 0, f"block {block} released more often than taken"

    def find(self, group: int, block_hash: bytes) -> int | None:
        return self._cached[group].get(block_hash)

    def cached(self, group: int) -> Collection[bytes]:
        """Returns the hashes of a group's cached blocks; they change with the cache. A model without groups has none."""
        return self._cached[group].keys() if self._cached else ()

    def is_free(self, block: int) -> bool:
        return self.refs[block] == 0

    def cache_block(self, group: int, block_hash: bytes, block: int) -> bool:
        """Caches a full block by its hash. Returns False if the block is cached already, or another one has the same hash."""
        if self._hash_of[block] is not None or block_hash in self._cached[group]:
            return False
        self._cached[group][block_hash] = block
        self._hash_of[block] = (group, block_hash)
        self.version += 1
        return True

    def num_leading(self, group: int, hashes: list[bytes]) -> int:
        """Returns the number of leading hashes that are cached."""
        return sum(1 for _ in takewhile(self._cached[group].__contains__, hashes))

    def cached_mask(self, group: int, hashes: list[bytes]) -> bytes:
        """Returns a byte for each hash: 1 if it is cached, else 0."""
        return bytes(map(self._cached[group].__contains__, hashes))

    def evict_block(self, block: int) -> None:
        """Evicts a block from the cache, if it is there. If it is free, it is taken first from now on."""
        if not self.refs[block] and self._hash_of[block] is not None:
            self.num_blank += 1
            self._free.move_to_end(block, last=False)
        self._evict(block)

    def evict_free_blocks(self) -> None:
        """Evicts all free blocks from the cache."""
        for block in self._free:
            self._evict(block)
        self.num_blank = len(self._free)
        self._events.emptied()

    def _evict(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._cached[key[0]][key[1]]
            self._hash_of[block] = None
            self.version += 1
            self._events.removed(key[0], [key[1]])

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Asserts that reference counts match `tables`, all block tables in use. For idle moments and tests."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += block != NULL_BLOCK
        assert counts == self.refs, [(b, self.refs[b], n) for b, n in enumerate(counts) if n != self.refs[b]][:10]
        assert self.num_blank == sum(self._hash_of[block] is None for block in self._free)
        assert set(self._free) == {b for b in range(1, self.num_blocks) if counts[b] == 0}
