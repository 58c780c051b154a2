"""Ranks of any layout find and read what ranks of another layout have written to secondary tiers."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starling_engine.config import WorkerConfig
from starling_engine.kv.layer_specs import kv_specs
from starling_engine.kv.spec import group_layers
from starling_engine.kv_offload.secondary.base import ChunkPart, ObjectKey, ObjectMissing, TierCounters, TierError
from starling_engine.kv_offload.secondary.folder import tier as folder_tier
from starling_engine.kv_offload.secondary.parts import GroupShare, group_shares
from starling_engine.kv_offload.secondary.tiers import SecondaryTiers
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.model_config.layer import with_windows
from starling_engine.topology.layout import ParallelLayout

from tests.engine.kv_offload.objects import PART, key, quiet_tier
from tests.engine.model_config.test_config import of
from tests.engine.workers import plain_worker

MODEL = Path(__file__).parents[3] / "models" / "starling-pydoc"
NAMES = [bytes([i]) * 32 for i in range(4)]


class MemoryTier:
    """A secondary tier in memory."""

    name = "memory"

    def __init__(self) -> None:
        self.counters = TierCounters()
        self.objects: dict[ObjectKey, bytes] = {}
        self.writes = 0

    def lookup(self, keys: list[ObjectKey]) -> list[bool]:
        return [key in self.objects for key in keys]

    def read(self, key: ObjectKey, into: memoryview) -> None:
        if key not in self.objects:
            raise ObjectMissing(key)
        into[:] = self.objects[key]

    def write(self, key: ObjectKey, data: memoryview) -> None:
        self.writes += 1
        self.objects[key] = bytes(data)

    def close(self) -> None: ...


class Dead(MemoryTier):
    name = "dead"

    def write(self, _key: ObjectKey, _data: memoryview) -> None:
        raise TierError("out of order")


def model_of(layers: int, heads: int, windows: tuple[int, ...]) -> ModelConfig:
    model = load_model_config(MODEL)
    pattern = tuple(itertools.islice(itertools.cycle(windows), layers))
    return replace(model, layers=with_windows(pattern), num_heads=8, num_kv_heads=heads, head_dim=4)


def worker_of(layout: ParallelLayout, rank: int) -> WorkerConfig:
    return plain_worker(model_path=str(MODEL), max_model_len=256, max_num_seqs=1, layout=layout, rank=rank)


def shares(model: ModelConfig, layout: ParallelLayout) -> list[list[GroupShare]]:
    return [group_shares(model, worker_of(layout, rank)) for rank in range(layout.world_size)]


def local_part(share: GroupShare, whole: np.ndarray) -> np.ndarray:
    part = share.covers[0][0]
    return np.ascontiguousarray(whole[part.first_layer : part.end_layer, :, part.first_head : part.end_head])


@pytest.mark.parametrize(
    "layers, heads, windows", [(4, 2, (0,)), (12, 4, (0, 64, 64, 64)), (10, 4, (64, 64, 64, 64, 64, 0)), (9, 1, (0, 64))]
)
def test_any_layout_reads_what_any_other_wrote(layers: int, heads: int, windows: tuple[int, ...]) -> None:
    model = model_of(layers, heads, windows)
    layouts = [ParallelLayout(pipeline=p, tensor=t) for p in (1, 2, 4) for t in (1, 2, 4) if t <= heads or t % heads == 0]
    groups = group_layers(kv_specs(model, 16, "float32"))
    rng = np.random.default_rng(0)
    run_bytes = 64 * 4 * 4
    whole = [[rng.integers(0, 256, (len(g.layers), 2, heads, run_bytes), np.uint8) for _ in NAMES] for g in groups]
    for writer, reader in itertools.product(layouts, layouts):
        memory = MemoryTier()
        for rank in shares(model, writer):
            tiers = SecondaryTiers([memory], rank)
            for group, name in itertools.product(range(len(groups)), range(len(NAMES))):
                if rank[group].covers and (group or name or not windows[0]):  # a window's first chunk is gone
                    assert tiers.write((group, NAMES[name]), local_part(rank[group], whole[group][name]).reshape(-1).data)
        assert memory.writes == len(memory.objects), "what several ranks hold alike is written by one"
        for rank in shares(model, reader):
            tiers = SecondaryTiers([memory], rank)
            chunks = [(group, name) for group in range(len(groups)) for name in range(len(NAMES))]
            found = tiers.lookup([(group, NAMES[name]) for group, name in chunks])
            for (group, name), has in zip(chunks, found, strict=True):
                needed = name >= len(NAMES) - (rank[group].window or len(NAMES))
                assert has == (needed or not rank[group].covers), (writer, reader, group, name)
                if has and rank[group].covers:
                    expected = local_part(rank[group], whole[group][name])
                    into = bytearray(expected.nbytes)
                    assert tiers.read((group, NAMES[name]), memoryview(into))
                    assert bytes(into) == expected.tobytes()


def test_a_prefix_is_looked_for_from_its_start_and_a_window_only_at_its_end() -> None:
    memory, part = MemoryTier(), ChunkPart(0, 1, 0, 1)
    names = [n.to_bytes(32, "big") for n in range(300)]
    memory.objects = {ObjectKey(name, 0, part): b"" for name in names[:100]} | {ObjectKey(name, 1, part): b"" for name in names}
    del memory.objects[ObjectKey(names[98], 1, part)]
    tiers = SecondaryTiers([memory], [GroupShare([[part]], 1, 1), GroupShare([[part]], 1, 1, window=3)])
    chunks = [(group, name) for name in names for group in range(2)]
    found = {chunk for chunk, there in zip(chunks, tiers.lookup(chunks), strict=True) if there}
    assert {names.index(name) for group, name in found if group == 0} == set(range(100))
    assert {names.index(name) for group, name in found if group == 1} == {95, 96, 97, 99}, "what 98 chunks need, and those of 100"
    assert tiers.reports()["memory"].queries_total < 150


def test_a_snapshot_is_found_by_its_first_piece_if_all_are_there() -> None:
    """A lookup of a long prefix looks for the last ones, and none behind what its keys and values reach."""
    memory, part = MemoryTier(), ChunkPart(0, 1, 0, 1)
    names = [n.to_bytes(32, "big") for n in range(300)]
    memory.objects = {ObjectKey(name, 0, part): b"k" for name in names[:250]}
    pieces = {ObjectKey(names[at], piece, part): bytes([piece]) for at in (10, 90, 200, 240, 260) for piece in (1, 2, 3)}
    memory.objects |= pieces
    del memory.objects[ObjectKey(names[240], 3, part)]
    tiers = SecondaryTiers([memory], [GroupShare([[part]], 1, 1), *[GroupShare([[part]], 1, 1, snapshot=True)] * 3])
    chunks = [(group, name) for name in names for group in range(2)]
    found = {chunk for chunk, there in zip(chunks, tiers.lookup(chunks), strict=True) if there}
    assert [names.index(name) for group, name in found if group == 1] == [200]
    into = bytearray(1)
    for piece in (1, 2, 3):
        assert tiers.read((piece, names[200]), memoryview(into)) and into == bytes([piece])


def test_beside_a_state_no_other_layouts_are_asked_for() -> None:
    """Their objects have other fingerprints: each miss would cost several operations of a store."""
    model = of("FalconH1ForCausalLM", mamba_n_heads=8, mamba_d_ssm=128)
    for rank in range(2):
        shares = group_shares(model, worker_of(ParallelLayout(tensor=2), rank))
        assert [share.snapshot for share in shares] == [False, *[True] * (len(shares) - 1)] and len(shares) > 1
        assert all(len(share.covers) == 1 for share in shares)


def test_a_slow_folder_answers_what_it_found_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount with 2 ms a stat takes longer for a long prompt than a folder may that works."""
    monkeypatch.setattr(folder_tier, "SLOW_READ", 3.0)
    clock, tier = [0.0], quiet_tier(tmp_path)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    tier.breakers.folder._clock = lambda: clock[0]
    stat, names = os.stat, [key(n).name for n in range(2048)]
    there = {str(tier._layout.path_of(key(n))) for n in range(2000)}

    def slow(path: str | Path, **more: Any) -> object:
        clock[0] += 0.002
        return stat(tmp_path) if str(path) in there else stat(path, **more)

    monkeypatch.setattr("os.stat", slow)
    found = SecondaryTiers([tier], [GroupShare([[PART]], 1, 1)]).lookup([(0, name) for name in names])
    count = sum(found)
    assert found == [True] * count + [False] * (2048 - count)
    assert count >= 700, "those of 1.5 s"
    assert not tier.breakers.folder.is_open and not tier.counters.errors


def test_a_tier_that_is_out_of_order_does_not_stop_the_others() -> None:
    """A chunk that one of them took is written: the next chunks follow."""
    one, dead, data = MemoryTier(), Dead(), memoryview(bytearray(b"content"))
    groups = [GroupShare([[ChunkPart(0, 1, 0, 1)]], 1, len(data))]
    for order in ([one, dead], [dead, one]):
        one.objects.clear()
        tiers = SecondaryTiers(order, groups)
        assert tiers.write((0, NAMES[0]), data)
        assert list(one.objects.values()) == [b"content"]
        assert tiers.reports()["memory"].stored_bytes_total == len(data) and not tiers.reports()["dead"].stored_bytes_total
    assert not SecondaryTiers([dead], groups).write((0, NAMES[0]), data)
