"""A rank's secondary tiers: it writes objects of its own part of a chunk, and reads what any layout has written."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256

import msgspec
import numpy as np
import numpy.typing as npt

from starling_engine.config import CACHE_VERSION, QUANTIZATION_VERSION, TiersConfig, WorkerConfig
from starling_engine.delta import TierStats
from starling_engine.kv.layer_specs import state_group, whole_groups
from starling_engine.kv_offload.secondary.base import (
    LOOKUP_SECONDS,
    Chunk,
    ChunkPart,
    ObjectKey,
    ObjectMissing,
    SecondaryTier,
    TierCounters,
    TierError,
)
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of
from starling_engine.kv_offload.secondary.parts import GroupShare, group_shares, overlap, run_bytes
from starling_engine.kv_offload.sizes import rank_slab_bytes
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.plugins import package_of

STATE_LAYOUT = 1
"""Version of what the numbers of a recurrent state mean, and of their order in its blocks."""


def open_secondary(tiers: TiersConfig, model: ModelConfig, config: WorkerConfig) -> "SecondaryTiers | None":
    """Opens the folder, which is nearer, and the store; None where there is neither. Raises ConfigError."""
    opened: list[SecondaryTier] = []
    if tiers.has_secondary:
        found = fingerprint_of(config.model_path, config.load_format, config.seed, cached_as(model, config))
        fingerprint = replace(found, layout=chunk_layout(model, config))
        if tiers.fs_path is not None:
            from starling_engine.kv_offload.secondary.folder.tier import open_folder

            opened.append(open_folder(tiers.fs_path, tiers.fs_bytes, tiers.fs_direct, fingerprint))
        if tiers.store is not None:
            from starling_engine.kv_offload.secondary.store.tier import open_store

            opened.append(open_store(tiers.store, fingerprint.digest))
    return SecondaryTiers(opened, group_shares(model, config)) if opened else None


def cached_as(model: ModelConfig, config: WorkerConfig) -> str:
    """Says how keys and values are computed, rounded and rotated: engines of which this differs share none."""
    # How they are rounded depends on the dtype that they were computed in.
    cached = "float8_e4m3fn" if config.kv_cache == "fp8" else f"{config.kv_cache} (version {CACHE_VERSION})"
    kind = config.dtype if config.kv_cache is None else f"{cached} of {config.dtype}"
    if config.quantization is not None:
        kind = f"{kind} by weights in {config.quantization} (version {QUANTIZATION_VERSION})"
    factors = model.rope_factors(config.max_model_len)
    if factors:
        kind = f"{kind}, rotated by {factors} factors"
    package = package_of(model.architecture)
    if package is not None:  # another version of it may compute other keys from the same weights
        kind = f"{kind}, as in {package}"
    return f"{kind}, with {state_layout(model, config)}" if model.has_state else kind


def chunk_layout(model: ModelConfig, config: WorkerConfig) -> str:
    """Says which layers a chunk of each KV group has, and in which form: engines of which this differs share none.

    It is the same for all layouts of ranks that group layers alike, as those of most models do. It is the same for all sizes of
    blocks, but for models that compress runs of tokens.
    """
    groups = whole_groups(model, config)
    return repr([(group.layers, group.spec.planes, group.spec.num_kv_heads, run_bytes(group, config)) for group in groups])


def state_layout(model: ModelConfig, config: WorkerConfig) -> str:
    """Says how the ranks' blocks hold a model's state: its snapshots are of use to engines of the same layout alone."""
    layout, ranks = config.layout, [replace(config, rank=rank) for rank in range(config.layout.world_size)]
    blocks = [(rank_slab_bytes(model, rank), state_group(model, rank)) for rank in ranks]
    digest = sha256(repr((STATE_LAYOUT, whole_groups(model, config), blocks)).encode()).hexdigest()[:16]
    return f"state {digest} (TP {layout.tensor}, PP {layout.pipeline}, blocks of {config.block_size})"


class SecondaryTiers:
    """Several threads call it. Lookups and reads go to the tiers in their order, writes to all of them."""

    def __init__(self, tiers: Sequence[SecondaryTier], groups: Sequence[GroupShare]) -> None:
        self.tiers = list(tiers)
        self._groups = list(groups)
        self._found: OrderedDict[Chunk, tuple[SecondaryTier, list[ChunkPart]]] = OrderedDict()
        self._stats = {tier.name: TierStats() for tier in tiers}
        self._lock = threading.Lock()

    def reports(self) -> dict[str, TierStats]:
        """Returns this rank's counters of each tier, by name."""
        with self._lock:
            return {tier.name: _with_contents(self._stats[tier.name], tier.counters) for tier in self.tiers}

    @property
    def cpu_elsewhere(self) -> float:
        """Processor time in seconds of the tiers' own threads and processes; may start again from 0."""
        return sum(tier.cpu_elsewhere for tier in self.tiers)

    def _count(self, tier: SecondaryTier, **more: float) -> None:
        with self._lock:
            stats = self._stats[tier.name]
            for name, value in more.items():
                setattr(stats, name, getattr(stats, name) + value)

    # ---- lookup ----

    def lookup(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Returns for each chunk whether one tier has all that this rank needs of it, under one layout.

        The chunks of each group are in the order of one prefix. A miss in a group without a window ends the prefix: nothing behind
        it is looked up, nor is anything after half of LOOKUP_SECONDS. The first piece of a snapshot is there if all pieces are.
        """
        end = time.monotonic() + LOOKUP_SECONDS / 2
        found = {chunk for chunk in chunks if not self._groups[chunk[0]].covers}
        prefix = list(dict.fromkeys(name for _, name in chunks))
        without_window = [chunk for chunk in chunks if not (share := self._groups[chunk[0]]).window and not share.snapshot]
        missing = self._lookup_run(without_window, found, end)
        if missing is not None:
            prefix = prefix[: prefix.index(without_window[missing][1])]
        reached = set(prefix)
        for group, share in enumerate(self._groups):
            if share.window:
                candidates = [chunk for chunk in chunks if chunk[0] == group and chunk[1] in reached]
                self._lookup_window(candidates, share.window, found, end)
        pieces = [group for group, share in enumerate(self._groups) if share.snapshot]
        if pieces:
            asked = [chunk for chunk in chunks if chunk[0] == pieces[0] and chunk[1] in reached]
            self._lookup_snapshots(asked, pieces, found, end)
        return [chunk in found for chunk in chunks]

    def _lookup_window(self, candidates: list[Chunk], window: int, found: set[Chunk], end: float) -> None:
        """Looks up what the longest prefix needs whose window is there, and no more."""
        while candidates and time.monotonic() < end:
            missing = self._lookup_run(candidates[-window:], found, end)
            if missing is None:
                return
            candidates = candidates[: max(0, len(candidates) - window) + missing]

    def _lookup_snapshots(self, chunks: list[Chunk], pieces: Sequence[int], found: set[Chunk], end: float, size: int = 64) -> None:
        """Looks up snapshots by their first pieces, from the prefix's end on, until there are some with all of their pieces."""
        whole = False
        while chunks and not whole and time.monotonic() < end:
            chunks, part = chunks[:-size], chunks[-size:]
            self._lookup_slice(part, found)
            for chunk in [chunk for chunk in part if chunk in found and self._groups[chunk[0]].covers]:
                if self._lookup_run([(piece, chunk[1]) for piece in pieces[1:]], found, end) is None:
                    whole = True
                else:
                    found.discard(chunk)

    def _lookup_run(self, chunks: Sequence[Chunk], found: set[Chunk], end: float, size: int = 64) -> int | None:
        """Looks chunks up until one is missing or time is over. Returns the index of the first missing one.

        `size` chunks at once have the time limit of one operation.
        """
        for start in range(0, len(chunks), size):
            part = chunks[start : start + size]
            if time.monotonic() < end:
                self._lookup_slice(part, found)
            for at, chunk in enumerate(part, start):
                if chunk not in found:
                    return at
        return None

    def _lookup_slice(self, chunks: Sequence[Chunk], found: set[Chunk]) -> None:
        for tier in self.tiers:
            wanted, before = [chunk for chunk in chunks if chunk not in found], len(found)
            with suppress(TierError):
                self._lookup_in(tier, wanted, found)
            self._count(tier, queries_total=len(wanted), hits_total=len(found) - before)

    def _lookup_in(self, tier: SecondaryTier, chunks: Sequence[Chunk], found: set[Chunk]) -> None:
        """Tries one layout after another. Few were ever written with, so each is tried with a few chunks of each group first."""
        for layout in range(max((len(share.covers) for share in self._groups), default=0)):
            missing = [chunk for chunk in chunks if chunk not in found and layout < len(self._groups[chunk[0]].covers)]
            if not missing:
                return
            if layout and not self._whole(tier, _probes(missing), layout):
                continue
            for chunk in self._whole(tier, missing, layout):
                found.add(chunk)
                self._remember(chunk, tier, self._groups[chunk[0]].covers[layout])

    def _whole(self, tier: SecondaryTier, chunks: Sequence[Chunk], layout: int) -> list[Chunk]:
        """Returns those of the chunks that the tier has whole under a layout."""
        keys = {chunk: [_key(chunk, part) for part in self._groups[chunk[0]].covers[layout]] for chunk in chunks}
        flat = [key for parts in keys.values() for key in parts]
        has = dict(zip(flat, tier.lookup(flat), strict=True))
        return [chunk for chunk, parts in keys.items() if all(has[key] for key in parts)]

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
                tier.read(_key(chunk, local), into)
            else:
                self._assemble(tier, chunk, cover, np.frombuffer(into, np.uint8).reshape(share.shape(local)))
        except (ObjectMissing, TierError):
            return False
        self._count(tier, loaded_bytes_total=len(into), load_seconds_total=time.perf_counter() - began)
        return True

    def _assemble(self, tier: SecondaryTier, chunk: Chunk, cover: list[ChunkPart], target: npt.NDArray[np.uint8]) -> None:
        share = self._groups[chunk[0]]
        local = share.covers[0][0]
        for part in cover:
            piece = np.empty(share.shape(part), np.uint8)
            tier.read(_key(chunk, part), piece.reshape(-1).data)
            both = overlap(part, local)
            assert both is not None, "a cover has no part that is not needed"
            target[_within(both, local)] = piece[_within(both, part)]

    def write(self, chunk: Chunk, data: memoryview) -> bool:
        """Writes this rank's part to every tier. Returns whether one of them took it; those that did not get no second try."""
        share = self._groups[chunk[0]]
        if not share.covers or not share.writes:
            return True
        key = _key(chunk, share.covers[0][0])
        written = [self._write_to(tier, key, data) for tier in self.tiers]
        return any(written)

    def _write_to(self, tier: SecondaryTier, key: ObjectKey, data: memoryview) -> bool:
        began = time.perf_counter()
        try:
            tier.write(key, data)
        except TierError:
            return False
        self._count(tier, stored_bytes_total=len(data), store_seconds_total=time.perf_counter() - began)
        return True

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def _with_contents(stats: TierStats, held: TierCounters) -> TierStats:
    return msgspec.structs.replace(
        stats,
        bytes=held.bytes,
        objects=held.objects,
        evictions_total=held.evicted,
        corrupt_total=held.corrupt,
        errors_total=held.errors,
        refused_total=held.refused,
        full_total=held.full,
    )


def _key(chunk: Chunk, part: ChunkPart) -> ObjectKey:
    return ObjectKey(chunk[1], chunk[0], part)


def _probes(chunks: Sequence[Chunk], count: int = 4) -> list[Chunk]:
    """Picks some chunks of each group, spread over it: the first ones of a window may be gone, as nobody needs them."""
    picked: list[Chunk] = []
    for group in {group for group, _ in chunks}:
        candidates = [chunk for chunk in chunks if chunk[0] == group]
        picked += candidates[:: -(-len(candidates) // count)]
    return picked


def _within(part: ChunkPart, whole: ChunkPart) -> tuple[slice, slice, slice]:
    """Returns where `part` is in an array [layers, planes, heads, ...] of `whole`."""
    layers = slice(part.first_layer - whole.first_layer, part.end_layer - whole.first_layer)
    return layers, slice(None), slice(part.first_head - whole.first_head, part.end_head - whole.first_head)
