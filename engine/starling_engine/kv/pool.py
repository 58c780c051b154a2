"""The pool of pages that all KV groups share: reference counts, an LRU free list, and the names of cached blocks."""

from collections import OrderedDict
from itertools import takewhile

from starling_engine.kv.events import EventLog

NULL_BLOCK = 0
"""Stands in block tables where a block is not needed any more. Never written for a request, never read."""


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than were asked for; nothing was taken."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1 by number. All operations are O(1) a block.

    A block with no reference is free. A free block keeps its name until it is taken for something else, least recently freed first,
    so a cached prefix is found again as long as it can be.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, log: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_blank = num_blocks - 1
        """Free blocks without a name: taking them loses nothing."""
        self._names: list[tuple[int, bytes] | None] = [None] * num_blocks
        self.version = 0
        """Grows whenever a name is given or taken back: what was found at one version is there while it lasts."""
        self._log = log
        self._cached: list[dict[bytes, int]] = [{} for _ in range(num_groups)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can hold anything: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` free blocks, each with one reference. Raises OutOfBlocks."""
        free = self._free
        if count > len(free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(free)} free")
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.refs[block] = 1
            self.num_blank -= self._names[block] is None
            self._forget(block)
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a block that is in use or cached."""
        if self.refs[block] == 0:
            del self._free[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Drops one reference; the last one makes the block free: the last to be taken again if it has a name, else the first.

        A nameless block holds nothing that anybody could find, and its memory is warm.
        """
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._free[block] = None
            if self._names[block] is None:
                self._free.move_to_end(block, last=False)
                self.num_blank += 1
        assert self.refs[block] >= 0, f"block {block} released more often than taken"

    def find(self, group: int, name: bytes) -> int | None:
        return self._cached[group].get(name)

    def is_free(self, block: int) -> bool:
        return self.refs[block] == 0

    def remember(self, group: int, name: bytes, block: int) -> bool:
        """Names a full block. The first block of a name stays: a second one of the same content is not cached (False)."""
        if self._names[block] is not None or name in self._cached[group]:
            return False
        self._cached[group][name] = block
        self._names[block] = (group, name)
        self.version += 1
        return True

    def num_leading(self, group: int, names: list[bytes]) -> int:
        """How many of the names, from the first on, are known without a gap."""
        return sum(1 for _ in takewhile(self._cached[group].__contains__, names))

    def which(self, group: int, names: list[bytes]) -> bytes:
        """For each name a byte: 1 where it is known."""
        return bytes(map(self._cached[group].__contains__, names))

    def forget(self, block: int) -> None:
        """Takes the name of a block that is in use back; one without a name is left alone."""
        assert self.refs[block], "the names of free blocks are counted"
        self._forget(block)

    def forget_free(self) -> None:
        """Drops the names of all free blocks."""
        for block in self._free:
            self._forget(block)
        self.num_blank = len(self._free)
        if self._log is not None:
            self._log.emptied()

    def _forget(self, block: int) -> None:
        key = self._names[block]
        if key is not None:
            del self._cached[key[0]][key[1]]
            self._names[block] = None
            self.version += 1
            if self._log is not None:
                self._log.removed(key[0], [key[1]])

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Asserts that reference counts are what `tables`, all block tables in use, say. For idle moments and tests."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += block != NULL_BLOCK
        assert counts == self.refs, [(b, self.refs[b], n) for b, n in enumerate(counts) if n != self.refs[b]][:10]
        assert self.num_blank == sum(self._names[block] is None for block in self._free)
        assert set(self._free) == {b for b in range(1, self.num_blocks) if counts[b] == 0}
