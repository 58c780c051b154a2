"""The pool of blocks that all KV groups share: reference counts, free blocks in their order, and the hashes of cached blocks.

Free blocks are taken by GreedyDual-Size (Cao and Irani, USITS 1997). A block's rank is its worth, what it spares for its room, and
what it is added to: the rank of the last one that was evicted before it was freed. The lowest rank goes first. Of equal worth that
is the least recently freed one. What is spent is worth nothing: no rank is below that of the last eviction, so it goes before all
others.
"""

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from functools import lru_cache
from itertools import takewhile

from starling_engine.kv.events import EventLog

NULL_BLOCK = 0
"""Entry of block tables for a block that is not needed any more. Never written for a request, never read."""


CLASSES = 2
"""Classes of worth to a doubling."""


@lru_cache(maxsize=256)  # a sequence releases thousands of blocks of one worth
def worth_class(worth: float) -> float:
    """Returns the class of a worth: so few that all can be looked at."""
    return 2.0 ** (round(CLASSES * math.log2(worth)) / CLASSES) if worth else 0.0


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than are wanted; nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class BlockPool:
    """Blocks 1 .. num_blocks - 1 by number. All operations are O(1) a block.

    A block without a reference is free. Free blocks stay cached by hash until they are taken: first those that are not cached, then
    those that are spent, which nobody is expected to ask for, then the others by their rank.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))
        """Free blocks that are not cached; the last one is taken first, for its memory is warm."""
        self._free: defaultdict[float, OrderedDict[int, float]] = defaultdict(OrderedDict)
        """Ranks of free blocks that are cached, by their worth in few classes. In each the first one's rank is the least."""
        self._worth = [1.0] * num_blocks
        """The class of each block's worth, by which it was released last since it is cached."""
        self._evicted_rank = 0.0
        self._num_cached_free = 0
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
        return len(self._blank) + self._num_cached_free

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
        blank = min(count, len(self._blank))
        blocks = [self._blank.pop() for _ in range(blank)]
        if blank < count:
            blocks += self._take_cached(count - blank)
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def _take_cached(self, count: int) -> list[int]:
        """Takes the blocks of the lowest ranks. All classes are looked at once, and then one for each block."""
        lowest = [(next(iter(free.values())), worth) for worth, free in self._free.items() if free]
        heapq.heapify(lowest)
        blocks = []
        for _ in range(count):
            free = self._free[lowest[0][1]]
            block, self._evicted_rank = free.popitem(last=False)
            self._evict(block)
            blocks.append(block)
            if free:
                heapq.heapreplace(lowest, (next(iter(free.values())), lowest[0][1]))
            else:
                heapq.heappop(lowest)
        self._num_cached_free -= count
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a block that is in use or cached."""
        if self.refs[block] == 0:
            self._leave_cached(block)
        self.refs[block] += 1

    def _leave_cached(self, block: int) -> None:
        del self._free[self._worth[block]][block]
        self._num_cached_free -= 1

    def release(self, block: int, worth: float | None = None) -> None:
        """Drops one reference; without any the block is free, and ranked by its worth if it is cached: 0 for a spent one.

        Without a worth it has that by which it was released before, or 1.
        """
        self.refs[block] -= 1
        assert self.refs[block] >= 0, f"block {block} released more often than taken"
        if worth is not None:
            self._worth[block] = worth_class(worth)
        if self.refs[block] == 0 and self._hash_of[block] is None:
            self._blank.append(block)
        elif self.refs[block] == 0:
            self._rank(block)

    def _rank(self, block: int) -> None:
        worth = self._worth[block]
        self._free[worth][block] = self._evicted_rank + worth
        self._num_cached_free += 1

    def touch(self, block: int) -> None:
        """Ranks a block as one that is freed now, if it is free, cached and not spent."""
        if self._is_ranked(block) and self._worth[block]:
            self._leave_cached(block)
            self._rank(block)

    def spend(self, block: int) -> None:
        """Lets a cached block be taken before those that are not spent, if it is free."""
        if self._is_ranked(block):
            self._leave_cached(block)
            self._worth[block] = 0.0
            self._rank(block)

    def _is_ranked(self, block: int) -> bool:
        return self.refs[block] == 0 and self._hash_of[block] is not None

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
        self._worth[block] = 1.0  # that of what it held before is none of its own
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
        if self._is_ranked(block):
            self._leave_cached(block)
            self._blank.append(block)
        self._evict(block)

    def evict_free_blocks(self) -> None:
        """Evicts all free blocks from the cache."""
        for block in [block for free in self._free.values() for block in free]:
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
        free = [block for each in self._free.values() for block in each]
        assert all(self._hash_of[block] is not None for block in free) and len(free) == self._num_cached_free
        assert all(list(each.values()) == sorted(each.values()) for each in self._free.values())
        assert sorted([*self._blank, *free]) == [b for b in range(1, self.num_blocks) if counts[b] == 0]
