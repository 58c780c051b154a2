"""A rank's share of the chunks in the tiers outside: it writes objects of its own part, and reads what any layout has written."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from starling_engine.kv_offload.orders import TierReport
from starling_engine.kv_offload.primary import Chunk
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey, ObjectMissing, SecondaryTier, TierError
from starling_engine.kv_offload.secondary.parts import overlap

PROBES = 4
"""Chunks of a group with which a layout is tried."""
FIND_SLICE = 64
"""Chunks that are looked for at once: each has the time limits of one operation, and after a miss none is looked for."""
FIND_SECONDS = 1.5
"""After which what was not looked for counts as missing: requests wait 3 s, and are to get what was found by then."""
REMEMBERED = 65536
"""Chunks of which is known where they were found."""


@dataclass(frozen=True)
class GroupShare:
    """What of a group's chunks is here: `covers` as `parts.covers` gives them, `runs` of one layer and one head (keys, values)."""

    covers: list[list[ChunkPart]]
    planes: int
    run_bytes: int
    writes: bool = True
    """Whether it is this rank that writes what several hold alike."""
    window: int = 0
    """Chunks from the end of a prefix that a next token reads; 0 for all of them."""

    def shape(self, part: ChunkPart) -> tuple[int, int, int, int]:
        """[layers, planes, heads, bytes of a run]."""
        return (part.end_layer - part.first_layer, self.planes, part.end_head - part.first_head, self.run_bytes)


class SecondaryTiers:
    """Called by several threads at once. `tiers` are asked in their order; what is kept goes to all of them."""

    def __init__(self, tiers: Sequence[SecondaryTier], groups: Sequence[GroupShare]) -> None:
        self.tiers = list(tiers)
        self._groups = list(groups)
        self._found: OrderedDict[Chunk, tuple[SecondaryTier, list[ChunkPart]]] = OrderedDict()
        self._reports = {tier.name: TierReport(tier.counters) for tier in tiers}
        self._lock = threading.Lock()

    def reports(self) -> dict[str, TierReport]:
        with self._lock:
            return {tier.name: msgspec.structs.replace(self._reports[tier.name], held=tier.counters) for tier in self.tiers}

    @property
    def cpu_elsewhere(self) -> float:
        """Processor time in seconds that the tiers have taken besides the threads that call them; may begin anew."""
        return sum(tier.cpu_elsewhere for tier in self.tiers)

    def _count(self, tier: SecondaryTier, **more: float) -> None:
        with self._lock:
            report = self._reports[tier.name]
            for name, value in more.items():
                setattr(report, name, getattr(report, name) + value)

    def find(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Whether all that this rank needs of each is in one tier, under one layout.

        The chunks of each group are in the order of one prefix. What is missing in a group without a window ends it: nothing behind
        is looked for, nor anything after FIND_SECONDS.
        """
        end = time.monotonic() + FIND_SECONDS
        found = [not self._groups[group].covers for group, _ in chunks]
        whole = [i for i, (group, _) in enumerate(chunks) if not self._groups[group].window]
        places = {name: at for at, name in enumerate(dict.fromkeys(name for _, name in chunks))}
        hit = len(places)
        for part in _slices(whole):
            if time.monotonic() < end:
                self._find_slice(chunks, part, found)
            missing = next((i for i in part if not found[i]), None)
            if missing is not None:
                hit = places[chunks[missing][1]]
                break
        for group in range(len(self._groups)):
            if self._groups[group].window:
                own = [i for i, (g, name) in enumerate(chunks) if g == group and places[name] < hit]
                self._find_tail(chunks, own, self._groups[group].window, found, end)
        return found

    def _find_tail(self, chunks: Sequence[Chunk], own: list[int], window: int, found: list[bool], end: float) -> None:
        """Of a group with a window, what the longest prefix needs that has all of it, and no more."""
        while own and time.monotonic() < end:
            needed = own[-window:]
            for part in _slices(needed):
                self._find_slice(chunks, part, found)
            missing = next((at for at, i in enumerate(needed) if not found[i]), None)
            if missing is None:
                return
            own = own[: len(own) - len(needed) + missing]

    def _find_slice(self, chunks: Sequence[Chunk], which: list[int], found: list[bool]) -> None:
        asked = [i for i in which if not found[i]]
        there = [False] * len(asked)
        for tier in self.tiers:
            before = sum(there)
            with suppress(TierError):
                self._find_in(tier, [chunks[i] for i in asked], there)
            self._count(tier, queries=len(asked) - before, hits=sum(there) - before)
        for i, has in zip(asked, there, strict=True):
            found[i] = has

    def _find_in(self, tier: SecondaryTier, chunks: Sequence[Chunk], found: list[bool]) -> None:
        """One layout after another; most are unlike what anybody wrote, so each is tried with a few chunks of each group first."""
        for at in range(max((len(g.covers) for g in self._groups), default=0)):
            missing = [i for i, done in enumerate(found) if not done and at < len(self._groups[chunks[i][0]].covers)]
            if not missing:
                return
            if at and not any(self._has_all(tier, chunks, _probes(chunks, missing), at)):
                continue
            for i, has in zip(missing, self._has_all(tier, chunks, missing, at), strict=True):
                if has:
                    found[i] = True
                    self._remember(chunks[i], tier, self._groups[chunks[i][0]].covers[at])

    def _has_all(self, tier: SecondaryTier, chunks: Sequence[Chunk], which: list[int], at: int) -> list[bool]:
        keys = [[ObjectKey(chunks[i][1], chunks[i][0], part) for part in self._groups[chunks[i][0]].covers[at]] for i in which]
        has = dict(zip(flat := [key for several in keys for key in several], tier.find(flat), strict=True))
        return [all(has[key] for key in several) for several in keys]

    def _remember(self, chunk: Chunk, tier: SecondaryTier, cover: list[ChunkPart]) -> None:
        self._found[chunk] = (tier, cover)
        while len(self._found) > REMEMBERED:
            self._found.popitem(last=False)

    def fetch(self, chunk: Chunk, into: memoryview) -> bool:
        """Fills a slot, [layers][planes][heads][run] of this rank's part, with what `find` has found."""
        share = self._groups[chunk[0]]
        if not share.covers:
            return True
        place = self._found.pop(chunk, None)
        if place is None:
            return False
        tier, cover = place
        own, began = share.covers[0][0], time.perf_counter()
        try:
            if cover == [own]:
                tier.read(ObjectKey(chunk[1], chunk[0], own), into)
            else:
                self._assemble(tier, chunk, cover, np.frombuffer(into, np.uint8).reshape(share.shape(own)))
        except (ObjectMissing, TierError):
            return False
        self._count(tier, read_bytes=len(into), read_seconds=time.perf_counter() - began)
        return True

    def _assemble(self, tier: SecondaryTier, chunk: Chunk, cover: list[ChunkPart], target: npt.NDArray[np.uint8]) -> None:
        share = self._groups[chunk[0]]
        own = share.covers[0][0]
        for part in cover:
            piece = np.empty(share.shape(part), np.uint8)
            tier.read(ObjectKey(chunk[1], chunk[0], part), piece.reshape(-1).data)
            both = overlap(part, own)
            assert both is not None, "a cover has nothing that is not needed"
            target[_within(both, own)] = piece[_within(both, part)]

    def keep(self, chunk: Chunk, data: memoryview) -> bool:
        """Writes this rank's part to every tier; whether any took it. What one did not take is not tried again there: that it is
        out of order must not keep the others from what comes next.
        """
        share = self._groups[chunk[0]]
        if not share.covers or not share.writes:
            return True
        key = ObjectKey(chunk[1], chunk[0], share.covers[0][0])
        took = [self._keep_in(tier, key, data) for tier in self.tiers]
        return any(took)

    def _keep_in(self, tier: SecondaryTier, key: ObjectKey, data: memoryview) -> bool:
        began = time.perf_counter()
        try:
            tier.write(key, data)
        except TierError:
            return False
        self._count(tier, written_bytes=len(data), write_seconds=time.perf_counter() - began)
        return True

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def _slices(which: list[int]) -> Iterator[list[int]]:
    return (which[start : start + FIND_SLICE] for start in range(0, len(which), FIND_SLICE))


def _probes(chunks: Sequence[Chunk], missing: list[int]) -> list[int]:
    """Some of each group, from its first on: of a window, the first ones may be gone that nobody needs."""
    picked: list[int] = []
    for group in {chunks[i][0] for i in missing}:
        own = [i for i in missing if chunks[i][0] == group]
        picked += own[:: -(-len(own) // PROBES)]
    return picked


def _within(part: ChunkPart, whole: ChunkPart) -> tuple[slice, slice, slice]:
    """Of an array [layers, planes, heads, ...] of `whole`."""
    layers = slice(part.first_layer - whole.first_layer, part.end_layer - whole.first_layer)
    return layers, slice(None), slice(part.first_head - whole.first_head, part.end_head - whole.first_head)
