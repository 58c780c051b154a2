"""The index of cached prefixes: which backends have which blocks.

A backend is a bit, so that one look-up of a block answers for all.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class PrefixIndex:
    """Cached blocks of backends, by their hashes. It takes some 200 bytes for each block of each backend."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        """Mask of the backends that have a block, by its hash."""
        self._blocks: dict[int, set[int]] = {}
        """The same by backend, which can be forgotten as a whole."""

    def add(self, backend: int, blocks: Iterable[int]) -> None:
        own, bit = self._blocks.setdefault(backend, set()), 1 << backend
        for block in blocks:
            own.add(block)
            self._masks[block] = self._masks.get(block, 0) | bit

    def remove(self, backend: int, blocks: Iterable[int]) -> None:
        """Blocks that it does not have are left out."""
        own, bit = self._blocks.get(backend, set()), 1 << backend
        for block in blocks:
            if block in own:
                own.remove(block)
                self._drop(block, bit)

    def forget(self, backend: int) -> None:
        """Removes all blocks of a backend."""
        bit = 1 << backend
        for block in self._blocks.pop(backend, ()):
            self._drop(block, bit)

    def count(self, backend: int) -> int:
        """Returns how many blocks it has."""
        return len(self._blocks.get(backend, ()))

    def mask(self, block: int) -> int:
        """Returns the mask of the backends that have a block."""
        return self._masks.get(block, 0)

    def _drop(self, block: int, bit: int) -> None:
        left = self._masks[block] & ~bit
        if left:
            self._masks[block] = left
        else:
            del self._masks[block]


class Snapshots:
    """Snapshots that backends with a recurrent state have, by the blocks at whose ends they are.

    needed   mask of these backends: they have a prefix up to a snapshot
    alone    mask of those among them that have no blocks: a snapshot is all that they need
    """

    def __init__(self, indexes: Sequence[PrefixIndex] = ()) -> None:
        self.indexes = indexes
        self.needed = self.alone = 0

    def set(self, backend: int, *, needed: bool, alone: bool) -> None:
        """Notes whether a backend needs snapshots, and nothing else."""
        bit = 1 << backend
        self.needed = self.needed | bit if needed else self.needed & ~bit
        self.alone = self.alone | bit if alone else self.alone & ~bit


NO_SNAPSHOTS = Snapshots()


def longest_prefixes(
    indexes: Sequence[PrefixIndex], blocks: Sequence[int], snapshots: Snapshots = NO_SNAPSHOTS
) -> Iterator[tuple[int, int]]:
    """Yields (backend, how many of the first blocks it has in any of the indexes) for each backend that has the first one.

    Of a backend that needs snapshots it is the number up to the last one among these blocks.
    """
    alive, before = -1, 0
    ends: dict[int, int] = {}
    for count, block in enumerate(blocks):
        mask = snapshots.alone | _mask(indexes, block)
        before, alive = alive, alive & mask
        if count and before != alive:
            yield from ((backend, count) for backend in _bits(before & ~alive & ~snapshots.needed))
        if not alive:
            break
        if stateful := alive & snapshots.needed:
            ends.update(dict.fromkeys(_bits(stateful & _mask(snapshots.indexes, block)), count + 1))
    if blocks:
        yield from ((backend, len(blocks)) for backend in _bits(alive & ~snapshots.needed))
    yield from ends.items()


def _mask(indexes: Sequence[PrefixIndex], block: int) -> int:
    """Returns the mask of the backends that have a block in any of the indexes."""
    mask = 0
    for index in indexes:
        mask |= index.mask(block)
    return mask


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class GuessedIndex:
    """Guesses what backends have cached from what they were sent, the last `most` blocks of each."""

    def __init__(self, most: int) -> None:
        self.index = PrefixIndex()
        self._most = most
        self._recent: dict[int, OrderedDict[int, None]] = {}

    def sent(self, backend: int, blocks: Sequence[int]) -> None:
        """Notes a prompt's blocks. The last ones of a prompt are given up first, as engines do."""
        recent = self._recent.setdefault(backend, OrderedDict())
        for block in reversed(blocks):
            recent[block] = None
            recent.move_to_end(block)
        self.index.add(backend, blocks)
        while len(recent) > self._most:
            self.index.remove(backend, (recent.popitem(last=False)[0],))

    def forget(self, backend: int) -> None:
        self._recent.pop(backend, None)
        self.index.forget(backend)
