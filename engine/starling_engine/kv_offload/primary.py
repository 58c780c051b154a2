"""The CPU tier as the scheduler sees it: which chunk lies in which slot of the ranks' host memory."""

from collections.abc import Container, Iterable

from starling_engine.config import EvictionPolicy
from starling_engine.kv.events import BlockSpan
from starling_engine.kv_offload.eviction import Eviction, make_eviction
from starling_engine.kv_offload.kv_event_mirror import KVEventMirror

Chunk = tuple[int, bytes]
"""KV group, and the chain's value at the chunk's end."""


class PrimaryIndex:
    """Slots 0 .. num_slots - 1, the same on every rank. A slot that is read or written is pinned, and never given up meanwhile.

    What is there (`has`) is `told`, where somebody listens.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy, told: KVEventMirror | None = None) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self.full = 0
        """How often there was no slot to give."""
        self._eviction: Eviction[Chunk] = make_eviction(policy, num_slots)
        self._slots: dict[Chunk, int] = {}
        self._before: dict[Chunk, bytes | None] = {}
        """Of each chunk in a slot, the name of the one before it in its prefix; None for a first one."""
        self._coming: set[Chunk] = set()
        self._doomed: set[Chunk] = set()
        """To be given up as soon as they are not pinned any more."""
        self._pins: dict[Chunk, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._told = told

    def __len__(self) -> int:
        """Chunks that are there."""
        return len(self._slots) - len(self._coming)

    @property
    def num_pins(self) -> int:
        """As often as chunks have been pinned."""
        return sum(self._pins.values())

    @property
    def num_pinned(self) -> int:
        """Slots."""
        return len(self._pins)

    def find(self, chunk: Chunk) -> int | None:
        """Its slot, if it is there and not only on its way."""
        return self._slots[chunk] if self.has(chunk) else None

    def has(self, chunk: Chunk) -> bool:
        return chunk in self._slots and chunk not in self._coming and chunk not in self._doomed

    def expects(self, chunk: Chunk) -> bool:
        """Whether it is there or on its way."""
        return chunk in self._slots

    def take(self, chunk: Chunk, span: BlockSpan) -> int | None:
        """A pinned slot for a chunk that is to come, at the cost of another one; None when all slots are pinned."""
        assert chunk not in self._slots, "asked for once"
        if not self._free:
            victim = self._eviction.victim(chunk, self._pins.__contains__)
            if victim is None:
                self.full += 1
                return None
            if self._told is not None:
                self._told.gone(victim)
            self._free.append(self._slots.pop(victim))
            del self._before[victim]
            self.evictions += 1
        slot = self._slots[chunk] = self._free.pop()
        self._before[chunk] = span.parent
        self._eviction.add(chunk)
        self._coming.add(chunk)
        if self._told is not None:
            self._told.coming(chunk, span)
        self.pin(chunk)
        return slot

    def settle(self, chunk: Chunk, *, arrived: bool) -> None:
        """What `take` was for has come, or will not."""
        self._coming.discard(chunk)
        if not arrived:
            self._doomed.add(chunk)
        elif self._told is not None and self.has(chunk):
            self._told.arrived(chunk)
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
                self._drop(chunk)

    def use(self, chunk: Chunk) -> None:
        """It was wanted again."""
        if chunk in self._slots:
            self._eviction.use(chunk)

    def renew(self, chunks: Iterable[Chunk]) -> None:
        """Makes these and what is before them the youngest, a prefix's beginning younger than its end and all groups alike.

        A prefix is of use from its start on only, so it has to lose its end first. Of several, the last becomes the youngest.
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
        """From a chunk to its prefix's start, as far as any of the groups has it and it is not known."""
        path: list[bytes] = []
        while name is not None and name not in known:
            held = next((group for group in groups if (group, name) in self._slots), None)
            if held is None:
                break
            path.append(name)
            name = self._before[held, name]
        return path

    def give_up(self, chunk: Chunk) -> None:
        """It is found no more, and its slot is free as soon as it is not pinned."""
        if chunk not in self._slots:
            return
        if self._told is not None and self.has(chunk):
            self._told.gone(chunk)
        if chunk in self._pins:
            self._doomed.add(chunk)
        else:
            self._drop(chunk)

    def clear(self) -> None:
        """Gives up all of it; what is pinned, once it is not."""
        if self._told is not None:
            self._told.cleared(filter(self.has, self._slots))
        self._doomed.update(self._pins)
        for chunk in [c for c in self._slots if c not in self._pins]:
            self._drop(chunk)

    def _drop(self, chunk: Chunk) -> None:
        self._free.append(self._slots.pop(chunk))
        del self._before[chunk]
        self._eviction.remove(chunk)
        if self._told is not None:
            self._told.forget(chunk)

    def check_integrity(self) -> None:
        """Asserts that every slot is free or holds one chunk."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots))
        assert self._before.keys() == self._slots.keys()
        assert self._coming <= self._pins.keys() <= self._slots.keys()
        if self._told is not None:
            self._told.check_integrity(set(filter(self.has, self._slots)))
