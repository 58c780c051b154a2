"""A rank's secondary tiers: it writes objects of its own part of a chunk, and reads what any layout has written."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
import numpy.typing as npt

from starling_engine.config import TiersConfig, WorkerConfig
from starling_engine.kv_offload.orders import TierReport
from starling_engine.kv_offload.primary import Chunk
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey, ObjectMissing, SecondaryTier, TierError
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of
from starling_engine.kv_offload.secondary.parts import GroupShare, group_shares, overlap
from starling_engine.model_config.config import ModelConfig

ONE_LOOKUP_SECONDS = 1.5
"""Time limit of a lookup: requests wait for 3 s, and are to get what was found by then."""


def open_secondary(tiers: TiersConfig, model: ModelConfig, config: WorkerConfig) -> "SecondaryTiers | None":
    """Opens the folder, which is nearer, and the store; None where there is neither. Raises ConfigError."""
    opened: list[SecondaryTier] = []
    if tiers.has_secondary:
        # Rounding to fp8 depends on the dtype that keys and values were computed in.
        dtype = f"{config.kv_dtype} of {config.dtype}" if config.fp8_cache else config.dtype
        fingerprint = fingerprint_of(config.model_path, config.load_format, config.seed, dtype)
        if tiers.fs_path is not None:
            from starling_engine.kv_offload.secondary.folder.tier import open_folder

            opened.append(open_folder(tiers.fs_path, tiers.fs_bytes, tiers.fs_direct, fingerprint))
        if tiers.store is not None:
            from starling_engine.kv_offload.secondary.store.tier import open_store

            opened.append(open_store(tiers.store, fingerprint.digest))
    return SecondaryTiers(opened, group_shares(model, config)) if opened else None


class SecondaryTiers:
    """Several threads call it. Lookups and reads go to the tiers in their order, writes to all of them."""

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
        """Processor time in seconds of the tiers' own threads and processes; may start again from 0."""
        return sum(tier.cpu_elsewhere for tier in self.tiers)

    def _count(self, tier: SecondaryTier, **more: float) -> None:
        with self._lock:
            report = self._reports[tier.name]
            for name, value in more.items():
                setattr(report, name, getattr(report, name) + value)

    # ---- lookup ----

    def lookup(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Returns for each chunk whether one tier has all that this rank needs of it, under one layout.

        The chunks of each group are in the order of one prefix. A miss in a group without a window ends the prefix: nothing behind
        it is looked up, nor is anything after ONE_LOOKUP_SECONDS.
        """
        end = time.monotonic() + ONE_LOOKUP_SECONDS
        found = [not self._groups[group].covers for group, _ in chunks]
        without_window = [i for i, (group, _) in enumerate(chunks) if not self._groups[group].window]
        depths = {name: depth for depth, name in enumerate(dict.fromkeys(name for _, name in chunks))}
        prefix = len(depths)
        missing = self._lookup_run(chunks, without_window, found, end)
        if missing is not None:
            prefix = depths[chunks[without_window[missing]][1]]
        for group, share in enumerate(self._groups):
            if share.window:
                candidates = [i for i, (g, name) in enumerate(chunks) if g == group and depths[name] < prefix]
                self._lookup_window(chunks, candidates, share.window, found, end)
        return found

    def _lookup_window(self, chunks: Sequence[Chunk], candidates: list[int], window: int, found: list[bool], end: float) -> None:
        """Looks up what the longest prefix needs whose window is there, and no more."""
        while candidates and time.monotonic() < end:
            needed = candidates[-window:]
            missing = self._lookup_run(chunks, needed, found, end)
            if missing is None:
                return
            candidates = candidates[: len(candidates) - len(needed) + missing]

    def _lookup_run(self, chunks: Sequence[Chunk], which: list[int], found: list[bool], end: float, size: int = 64) -> int | None:
        """Looks chunks up until one is missing or time is over. Returns where in `which` the first missing one is.

        `size` chunks at once have the time limit of one operation.
        """
        for start in range(0, len(which), size):
            part = which[start : start + size]
            if time.monotonic() < end:
                self._lookup_slice(chunks, part, found)
            for at, i in enumerate(part, start):
                if not found[i]:
                    return at
        return None

    def _lookup_slice(self, chunks: Sequence[Chunk], which: list[int], found: list[bool]) -> None:
        wanted = [i for i in which if not found[i]]
        there = [False] * len(wanted)
        for tier in self.tiers:
            before = sum(there)
            with suppress(TierError):
                self._lookup_in(tier, [chunks[i] for i in wanted], there)
            self._count(tier, queries=len(wanted) - before, hits=sum(there) - before)
        for i, has in zip(wanted, there, strict=True):
            found[i] = has

    def _lookup_in(self, tier: SecondaryTier, chunks: Sequence[Chunk], found: list[bool]) -> None:
        """Tries one layout after another. Few were ever written with, so each is tried with a few chunks of each group first."""
        for layout in range(max((len(share.covers) for share in self._groups), default=0)):
            missing = [i for i, done in enumerate(found) if not done and layout < len(self._groups[chunks[i][0]].covers)]
            if not missing:
                return
            if layout and not any(self._has_all(tier, chunks, _probes(chunks, missing), layout)):
                continue
            for i, has in zip(missing, self._has_all(tier, chunks, missing, layout), strict=True):
                if has:
                    found[i] = True
                    self._remember(chunks[i], tier, self._groups[chunks[i][0]].covers[layout])

    def _has_all(self, tier: SecondaryTier, chunks: Sequence[Chunk], which: list[int], layout: int) -> list[bool]:
        keys = [[ObjectKey(chunks[i][1], chunks[i][0], part) for part in self._groups[chunks[i][0]].covers[layout]] for i in which]
        has = dict(zip(flat := [key for several in keys for key in several], tier.lookup(flat), strict=True))
        return [all(has[key] for key in several) for several in keys]

    def _remember(self, chunk: Chunk, tier: SecondaryTier, cover: list[ChunkPart], most: int = 65536) -> None:
        self._found[chunk] = (tier, cover)
        while len(self._found) > most:
            self._found.popitem(last=False)

    # ---- read and write ----

    def read(self, chunk: Chunk, into: memoryview) -> bool:
        """Fills a slot, [layers][planes][heads][run] of this rank's part, with what `lookup` has found. Returns whether it did."""
        share = self._groups[chunk[0]]
        if not share.covers:
            return True
        location = self._found.pop(chunk, None)
        if location is None:
            return False
        tier, cover = location
        local, began = share.covers[0][0], time.perf_counter()
        try:
            if cover == [local]:
                tier.read(ObjectKey(chunk[1], chunk[0], local), into)
            else:
                self._assemble(tier, chunk, cover, np.frombuffer(into, np.uint8).reshape(share.shape(local)))
        except (ObjectMissing, TierError):
            return False
        self._count(tier, read_bytes=len(into), read_seconds=time.perf_counter() - began)
        return True

    def _assemble(self, tier: SecondaryTier, chunk: Chunk, cover: list[ChunkPart], target: npt.NDArray[np.uint8]) -> None:
        share = self._groups[chunk[0]]
        local = share.covers[0][0]
        for part in cover:
            piece = np.empty(share.shape(part), np.uint8)
            tier.read(ObjectKey(chunk[1], chunk[0], part), piece.reshape(-1).data)
            both = overlap(part, local)
            assert both is not None, "a cover has no part that is not needed"
            target[_within(both, local)] = piece[_within(both, part)]

    def write(self, chunk: Chunk, data: memoryview) -> bool:
        """Writes this rank's part to every tier. Returns whether one of them took it; those that did not get no second try."""
        share = self._groups[chunk[0]]
        if not share.covers or not share.writes:
            return True
        key = ObjectKey(chunk[1], chunk[0], share.covers[0][0])
        written = [self._write_to(tier, key, data) for tier in self.tiers]
        return any(written)

    def _write_to(self, tier: SecondaryTier, key: ObjectKey, data: memoryview) -> bool:
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


def _probes(chunks: Sequence[Chunk], missing: list[int], count: int = 4) -> list[int]:
    """Picks some chunks of each group, spread over it: the first ones of a window may be gone, as nobody needs them."""
    picked: list[int] = []
    for group in {chunks[i][0] for i in missing}:
        candidates = [i for i in missing if chunks[i][0] == group]
        picked += candidates[:: -(-len(candidates) // count)]
    return picked


def _within(part: ChunkPart, whole: ChunkPart) -> tuple[slice, slice, slice]:
    """Returns where `part` is in an array [layers, planes, heads, ...] of `whole`."""
    layers = slice(part.first_layer - whole.first_layer, part.end_layer - whole.first_layer)
    return layers, slice(None), slice(part.first_head - whole.first_head, part.end_head - whole.first_head)
