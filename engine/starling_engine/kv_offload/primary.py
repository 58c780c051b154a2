"""The primary tier as the scheduler sees it: which chunk lies in which slot of the ranks' host memory."""

from collections import Counter
from collections.abc import Container, Iterable

from starling_engine.config import EvictionPolicy
from starling_engine.kv.events import BlockSpan, EventLog
from starling_engine.kv_offload.eviction import Eviction, make_eviction

Chunk = tuple[int, bytes]
"""KV group, and the block hash at the chunk's end."""


def write_back_slots(num_slots: int) -> int:
    """Returns how many slots may be pinned to be written back, however long that takes."""
    return 1 + num_slots // 4


class PrimaryIndex:
    """Slots 0 .. num_slots - 1, the same on every rank. A slot that is read or written is pinned, and not evicted meanwhile.

    `mirror` publishes what is there (`has`), where somebody listens.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy, mirror: "KVEventMirror | None" = None) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self.full = 0
        """Allocations that found no slot."""
        self._eviction: Eviction[Chunk] = make_eviction(policy, num_slots)
        self._slots: dict[Chunk, int] = {}
        self._before: dict[Chunk, bytes | None] = {}
        """Hash of the chunk before each one in its prefix; None for a first chunk."""
        self._coming: set[Chunk] = set()
        self._doomed: set[Chunk] = set()
        """Chunks to be dropped as soon as they are not pinned any more."""
        self._pins: dict[Chunk, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._mirror = mirror

    def __len__(self) -> int:
        """Number of chunks that have arrived."""
        return len(self._slots) - len(self._coming)

    @property
    def num_pins(self) -> int:
        """Pins of all chunks."""
        return sum(self._pins.values())

    @property
    def num_pinned(self) -> int:
        """Slots with at least one pin."""
        return len(self._pins)

    def has(self, chunk: Chunk) -> bool:
        return chunk in self._slots and chunk not in self._coming and chunk not in self._doomed

    def expects(self, chunk: Chunk) -> bool:
        """Returns whether the chunk has arrived or is on its way."""
        return chunk in self._slots

    def allocate(self, chunk: Chunk, span: BlockSpan) -> int | None:
        """Returns a pinned slot for a chunk that is to come, evicting another one; None when all slots are pinned."""
        assert chunk not in self._slots, "a chunk has one slot"
        if not self._free:
            victim = self._eviction.victim(chunk, self._pins.__contains__)
            if victim is None:
                self.full += 1
                return None
            if self._mirror is not None:
                self._mirror.removed(victim)
            self._free.append(self._slots.pop(victim))
            del self._before[victim]
            self.evictions += 1
        slot = self._slots[chunk] = self._free.pop()
        self._before[chunk] = span.parent
        self._eviction.add(chunk)
        self._coming.add(chunk)
        if self._mirror is not None:
            self._mirror.allocated(chunk, span)
        self.pin(chunk)
        return slot

    def settle(self, chunk: Chunk, *, arrived: bool) -> None:
        """An allocated chunk has arrived, or will not."""
        self._coming.discard(chunk)
        if not arrived:
            self._doomed.add(chunk)
        elif self._mirror is not None and self.has(chunk):
            self._mirror.arrived(chunk)
        self.unpin(chunk)

    def pin(self, chunk: Chunk) -> int:
        self._pins[chunk] = self._pins.get(chunk, 0) + 1
        return self._slots[chunk]

    def unpin(self, chunk: Chunk) -> None:
        self._pins[chunk] -= 1
        if not self._pins[chunk]:
            del self._pins[chunk]
            if chunk in self._doomed:
                self._doomed.discard(chunk)
                self._free_slot(chunk)

    def touch(self, chunk: Chunk) -> None:
        """The chunk was wanted again."""
        if chunk in self._slots:
            self._eviction.use(chunk)

    def renew(self, chunks: Iterable[Chunk]) -> None:
        """Makes these chunks and those before them the youngest, a prefix's beginning younger than its end, all groups alike.

        A prefix is useful only from its start on, so it has to lose its end first. The last of several becomes the youngest.
        """
        ends = list(chunks)
        groups = sorted({group for group, _ in ends})
        order: dict[bytes, None] = {}
        for _, end in reversed(ends):
            order.update(dict.fromkeys(reversed(self._path(end, groups, order))))
        for name in reversed(order):
            for group in groups:
                if (group, name) in self._slots:
                    self._eviction.renew((group, name))

    def _path(self, name: bytes | None, groups: list[int], known: Container[bytes]) -> list[bytes]:
        """Returns the path from a chunk to its prefix's start, as far as any group has it and it is not known."""
        path: list[bytes] = []
        while name is not None and name not in known:
            held = next((group for group in groups if (group, name) in self._slots), None)
            if held is None:
                break
            path.append(name)
            name = self._before[held, name]
        return path

    def drop(self, chunk: Chunk) -> None:
        """The chunk is not found any more, and its slot is free as soon as it is not pinned."""
        if chunk not in self._slots:
            return
        if self._mirror is not None and self.has(chunk):
            self._mirror.removed(chunk)
        if chunk in self._pins:
            self._doomed.add(chunk)
        else:
            self._free_slot(chunk)

    def clear(self) -> None:
        """Drops all chunks; pinned ones as soon as they are not pinned any more."""
        if self._mirror is not None:
            self._mirror.cleared(filter(self.has, self._slots))
        self._doomed.update(self._pins)
        for chunk in [c for c in self._slots if c not in self._pins]:
            self._free_slot(chunk)

    def _free_slot(self, chunk: Chunk) -> None:
        self._free.append(self._slots.pop(chunk))
        del self._before[chunk]
        self._eviction.remove(chunk)
        if self._mirror is not None:
            self._mirror.forget(chunk)

    def check_integrity(self) -> None:
        """Asserts that every slot is free or holds one chunk."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots))
        assert self._before.keys() == self._slots.keys()
        assert self._coming <= self._pins.keys() <= self._slots.keys()
        if self._mirror is not None:
            self._mirror.check_integrity(set(filter(self.has, self._slots)))


class KVEventMirror:
    """Publishes the chunks of a PrimaryIndex as KV events of blocks.

    Prefixes that part inside a chunk have chunks with the same first blocks. Such a block is published as stored with the first of
    those chunks, and as removed with the last one. A listener counts nothing.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._spans: dict[Chunk, BlockSpan] = {}
        """Blocks of each chunk that has a slot."""
        self._chunks: Counter[Chunk] = Counter()
        """Chunks that hold each published block."""

    def allocated(self, chunk: Chunk, span: BlockSpan) -> None:
        """A chunk has a slot; nothing is published until it has arrived."""
        self._spans[chunk] = span

    def arrived(self, chunk: Chunk) -> None:
        group, span = chunk[0], self._spans[chunk]
        known = sum(1 for name in span.hashes if self._chunks[group, name])  # the first ones, as a name is of all before
        self._chunks.update((group, name) for name in span.hashes)
        self._log.stored(group, span.after(known), "CPU")

    def removed(self, chunk: Chunk) -> None:
        """A chunk that had arrived has left."""
        group, names = chunk[0], self._spans.pop(chunk).hashes
        self._chunks.subtract((group, name) for name in names)
        last = [name for name in names if not self._chunks[group, name]]
        for name in last:
            del self._chunks[group, name]
        self._log.removed(group, last, "CPU")

    def forget(self, chunk: Chunk) -> None:
        """A chunk that is not published has left its slot."""
        self._spans.pop(chunk, None)

    def cleared(self, chunks: Iterable[Chunk]) -> None:
        """All these chunks had arrived, and none is left."""
        for chunk in chunks:
            self.removed(chunk)
        self._log.emptied()

    def check_integrity(self, there: set[Chunk]) -> None:
        """Asserts that these chunks are published, and no others."""
        assert there <= self._spans.keys()
        assert self._chunks == Counter((chunk[0], name) for chunk in there for name in self._spans[chunk].hashes)
