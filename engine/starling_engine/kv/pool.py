"""The pool of blocks that all KV groups share: reference counts, free blocks in their order, and the hashes of cached blocks."""

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

    A block without a reference is free. Free blocks stay cached by hash until they are taken: first those that are not cached, then
    those that are spent, which nobody is expected to ask for, then the others, least recently freed first.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))
        """Free blocks that are not cached; the last one is taken first, for its memory is warm."""
        self._spent: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[int, None] = OrderedDict()
        """Free blocks that are cached and not spent."""
        self._hash_of: list[tuple[int, bytes] | None] = [None] * num_blocks
        self.version = 0
        """Grows with each change of the cache: search results hold while it stays the same."""
        self._events = EventLog((), published=False) if events is None else events
        self._cached: list[dict[bytes, int]] = [{} for _ in range(num_groups)]

    @property
    def num_blank(self) -> int:
        """Free blocks that are not cached: taking them loses nothing."""
        return len(self._blank)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._spent) + len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def take(self, count: int) -> list[int]:
        """Takes `count` free blocks, each with one reference. Raises OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        blocks = [self._blank.pop() if self._blank else self._take_cached() for _ in range(count)]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def _take_cached(self) -> int:
        block, _ = (self._spent or self._free).popitem(last=False)
        self._evict(block)
        return block

    def share(self, block: int) -> None:
        """Adds a reference to a block that is in use or cached."""
        if self.refs[block] == 0:
            self._leave_cached(block)
        self.refs[block] += 1

    def _leave_cached(self, block: int) -> None:
        del (self._spent if block in self._spent else self._free)[block]

    def release(self, block: int, *, spent: bool = False) -> None:
        """Drops one reference; without any the block is free, and taken last if it is cached and not spent."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self._hash_of[block] is None:
                self._blank.append(block)
            else:
                (self._spent if spent else self._free)[block] = None
        assert self.refs[block] >= 0, f"block {block} released more often than taken"

    def touch(self, block: int) -> None:
        """Lets a block be taken last, if it is free, cached and not spent."""
        if block in self._free:
            self._free.move_to_end(block)

    def spend(self, block: int) -> None:
        """Lets a cached block be taken before those that are not spent, if it is free."""
        if block in self._free:
            del self._free[block]
            self._spent[block] = None

    def find(self, group: int, block_hash: bytes) -> int | None:
        return self._cached[group].get(block_hash)

    def cached(self, group: int) -> Collection[bytes]:
        """Returns the hashes of a group's cached blocks; they change with the cache. A model without groups has none."""
        return self._cached[group].keys() if self._cached else ()

    def is_free(self, block: int) -> bool:
        return self.refs[block] == 0

    def cache_block(self, group: int, block_hash: bytes, block: int) -> bool:
        """Caches a full block by its hash. Returns False if the block is cached already, or another one has the same hash.

        It takes the place of one that is free: that was of no use to who computed it again, and would be taken early.
        """
        other = self._cached[group].get(block_hash)
        if self._hash_of[block] is not None or (other is not None and self.refs[other]):
            return False
        if other is not None:
            self.evict_block(other)
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
            self._leave_cached(block)
            self._blank.append(block)
        self._evict(block)

    def evict_free_blocks(self) -> None:
        """Evicts all free blocks from the cache."""
        for block in [*self._spent, *self._free]:
            self.evict_block(block)
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
        assert all(self._hash_of[block] is None for block in self._blank)
        assert all(self._hash_of[block] is not None for block in (*self._spent, *self._free))
        assert sorted([*self._blank, *self._spent, *self._free]) == [b for b in range(1, self.num_blocks) if counts[b] == 0]
