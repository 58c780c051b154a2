"""The primary tier as the scheduler sees it: which chunk lies in which slot of the ranks' host memory."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping

from starling_engine.config import EvictionPolicy
from starling_engine.kv.events import BlockSpan, EventLog
from starling_engine.kv_offload.eviction import make_eviction
from starling_engine.kv_offload.secondary.base import Chunk


class PrimaryIndex:
    """Slots 0 .. num_slots - 1, the same on every rank. A slot that is read or written is pinned, and not evicted meanwhile.

    What is there (`has`) is published where somebody listens. `pieces` are the groups that pieces of a snapshot are.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy, pieces: range = range(0)) -> None:
        self.num_slots = num_slots
        self._pieces = pieces
        self.write_back_slots = 1 + num_slots // 4
        """Slots that may be pinned to be written back, however long that takes."""
        self.evictions = 0
        self.full = 0
        """Allocations that found no slot."""
        self._eviction = make_eviction(policy, num_slots)
        self._slots: dict[Chunk, int] = {}
        self._spans: dict[Chunk, BlockSpan] = {}
        """The blocks of each chunk that has a slot, and what is before it in its prefix. Listeners know of these blocks."""
        self._coming: set[Chunk] = set()
        self._doomed: set[Chunk] = set()
        """Chunks to be dropped as soon as they are not pinned any more."""
        self._pins: dict[Chunk, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._mirror: KVEventMirror | None = None

    def publish(self, log: EventLog | None) -> Collection[tuple[int, bytes]]:
        """Does as OffloadManager.publish says."""
        self._mirror = None if log is None else KVEventMirror(log, self._pieces, self._there())
        return () if self._mirror is None else self._mirror.blocks

    def _there(self) -> dict[Chunk, BlockSpan]:
        return {chunk: span for chunk, span in self._spans.items() if self.has(chunk)}

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
        if not self._free and not self._evict(chunk):
            self.full += 1
            return None
        self._slots[chunk] = self._free.pop()
        self._spans[chunk] = span
        self._eviction.add(chunk)
        self._coming.add(chunk)
        return self.pin(chunk)

    def _evict(self, incoming: Chunk) -> bool:
        victim = self._eviction.victim(incoming, self._pins.__contains__)
        if victim is None:
            return False
        self.evictions += 1
        if self._mirror is not None:
            self._mirror.removed(victim[0], self._spans[victim])
        self._release_slot(victim)
        return True

    def settle(self, outcome: Mapping[Chunk, bool]) -> None:
        """Allocated chunks have arrived, or will not."""
        for chunk, arrived in outcome.items():
            self._coming.discard(chunk)
            if not arrived:
                self._doomed.add(chunk)
            elif self._mirror is not None and self.has(chunk):
                self._mirror.arrived(chunk[0], self._spans[chunk])
        self.unpin(outcome)

    def pin(self, chunk: Chunk) -> int:
        self._pins[chunk] = self._pins.get(chunk, 0) + 1
        return self._slots[chunk]

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._pins[chunk] -= 1
            if not self._pins[chunk]:
                del self._pins[chunk]
                if chunk in self._doomed:
                    self._forget(chunk)

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
            name = self._spans[held, name].parent
        return path

    def drop(self, chunk: Chunk) -> None:
        """The chunk is not found any more, and its slot is free as soon as it is not pinned."""
        if chunk not in self._slots:
            return
        if self._mirror is not None and self.has(chunk):
            self._mirror.removed(chunk[0], self._spans[chunk])
        if chunk in self._pins:
            self._doomed.add(chunk)
        else:
            self._forget(chunk)

    def clear(self) -> None:
        """Drops all chunks; pinned ones as soon as they are not pinned any more."""
        for chunk in list(self._slots):
            self.drop(chunk)
        if self._mirror is not None:
            self._mirror.cleared()

    def _forget(self, chunk: Chunk) -> None:
        self._doomed.discard(chunk)
        self._eviction.remove(chunk)
        self._release_slot(chunk)

    def _release_slot(self, chunk: Chunk) -> None:
        self._free.append(self._slots.pop(chunk))
        del self._spans[chunk]

    def check_integrity(self) -> None:
        """Asserts that every slot is free or holds one chunk."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots))
        assert self._spans.keys() == self._slots.keys()
        assert self._coming <= self._pins.keys() <= self._slots.keys()
        if self._mirror is not None:
            self._mirror.check_integrity(self._there())


class KVEventMirror:
    """Publishes the chunks of a PrimaryIndex as KV events of blocks.

    Prefixes that part inside a chunk have chunks with the same first blocks. Such a block is published as stored with the first of
    those chunks, and as removed with the last one. A listener counts nothing. A snapshot is published as the block at whose end it
    is. It is stored once all of its pieces are there, and removed with the first of them.
    """

    def __init__(self, log: EventLog, pieces: range, there: Mapping[Chunk, BlockSpan]) -> None:
        """Listeners know of the chunks that are `there`."""
        self._log = log
        self._pieces = pieces
        self._chunks = self._count_blocks(there)
        """Chunks that hold each block, by its KV group and hash. A snapshot is a block of the group of its first piece."""

    @property
    def blocks(self) -> Collection[tuple[int, bytes]]:
        """Returns the blocks that are published."""
        return [key for key, count in self._chunks.items() if key[0] not in self._pieces or count == len(self._pieces)]

    def arrived(self, group: int, span: BlockSpan) -> None:
        if group in self._pieces:
            snapshot = self._pieces.start, span.hashes[-1]
            self._chunks[snapshot] += 1
            if self._chunks[snapshot] == len(self._pieces):
                self._log.stored(snapshot[0], span.after(len(span.hashes) - 1), "CPU")
            return
        known = sum(1 for name in span.hashes if self._chunks[group, name])  # the first ones, as a name is of all before
        self._chunks.update((group, name) for name in span.hashes)
        if known < len(span.hashes):
            self._log.stored(group, span.after(known), "CPU")

    def removed(self, group: int, span: BlockSpan) -> None:
        """A chunk that had arrived has left."""
        blocks = self._blocks_of(group, span)
        self._chunks.subtract(blocks)
        last = [block for block in blocks if not self._chunks[block]]
        for block in last:
            del self._chunks[block]
        if group in self._pieces:
            self._log.removed(self._pieces.start, span.hashes[-1:], "CPU")  # the log knows whether all of them were there
        elif last:
            self._log.removed(group, [name for _, name in last], "CPU")

    def cleared(self) -> None:
        """All chunks have left."""
        self._log.emptied()

    def check_integrity(self, there: Mapping[Chunk, BlockSpan]) -> None:
        """Asserts that these chunks are published, and no others."""
        assert self._chunks == self._count_blocks(there)

    def _blocks_of(self, group: int, span: BlockSpan) -> list[tuple[int, bytes]]:
        if group in self._pieces:
            return [(self._pieces.start, span.hashes[-1])]
        return [(group, name) for name in span.hashes]

    def _count_blocks(self, chunks: Mapping[Chunk, BlockSpan]) -> Counter[tuple[int, bytes]]:
        return Counter(block for (group, _), span in chunks.items() for block in self._blocks_of(group, span))
