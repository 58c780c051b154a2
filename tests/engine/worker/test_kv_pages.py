"""Slabs: where layers lie in them, and what a copy of a block takes along."""

import random

import pytest
import torch
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kv.spec import ChunkedLocalSpec, KVSpec, WindowSpec, group_layers
from starling_engine.native.weight_memory import LINE
from starling_engine.step import BlockCopy, StepPlan
from starling_engine.worker.host.kv_pages import KVPages, independent, within_attention_chunk
from starling_engine.worker.memory_plan import allocate

NARROW, WIDE, WINDOW = KVSpec(8, 1, 8, 4), KVSpec(8, 5, 8, 4), WindowSpec(8, 1, 8, 4, 16)
GROUPS = group_layers(dict(enumerate([NARROW, WIDE, NARROW, *[WINDOW] * 6])))
CPU = torch.device("cpu")


def test_layers_lie_one_behind_the_other_in_a_slab_and_groups_over_each_other() -> None:
    cache = allocate(GROUPS, 3, torch.float32, CPU)
    assert cache.storage.shape == (3, WIDE.layer_block_bytes) and not cache.storage.any()
    assert [group.layers for group in GROUPS] == [(0, 2), (1,), (3, 4, 5, 6, 7), (8,)]
    for group in GROUPS:
        for index, layer in enumerate(group.layers):
            view, size = cache.layers[layer], group.spec.layer_block_bytes
            assert view.shape == (3, *group.spec.layer_block_shape) and view[0].is_contiguous()
            view[1] = layer + 1
            assert (cache.storage[1, index * size : (index + 1) * size].view(torch.float32) == layer + 1).all()
    assert not cache.storage[[0, 2]].any()


def test_slabs_begin_at_a_cache_line() -> None:
    """Kernels read keys and values a line at a time."""
    assert allocate(GROUPS, 5000, torch.float32, CPU).storage.data_ptr() % LINE == 0


def test_a_block_is_copied_in_all_layers_of_its_group() -> None:
    cache = allocate(GROUPS, 4, torch.float32, CPU)
    cache.storage.random_(0, 256)
    before = cache.storage.clone()
    plan = StepPlan(0, 0, [], [], [], [], copies=[BlockCopy(0, 1, 3), BlockCopy(2, 2, 1)])
    KVPages(cache, GROUPS, lambda: None).copy(plan)
    size = NARROW.layer_block_bytes
    assert torch.equal(cache.storage[3, : 2 * size], before[1, : 2 * size])
    assert torch.equal(cache.storage[3, 2 * size :], before[3, 2 * size :])
    assert torch.equal(cache.storage[1, : 5 * size], before[2, : 5 * size])
    assert torch.equal(cache.storage[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], []),
        ([(1, 2), (3, 4), (1, 5)], [3]),
        ([(1, 2), (2, 3)], [1, 1]),  # reads what the one before writes
        ([(1, 3), (2, 1)], [1, 1]),  # writes what the one before reads
        ([(1, 3), (2, 3), (4, 5)], [1, 2]),  # writes what the one before writes
    ],
)
def test_copies_that_do_not_wait_for_others_are_made_at_once(pairs: list[tuple[int, int]], expected: list[int]) -> None:
    copies = [BlockCopy(0, *pair) for pair in pairs]
    runs = list(independent(copies))
    assert [len(run) for run in runs] == expected and [copy for run in runs for copy in run] == copies


def test_many_copies_do_what_one_after_the_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    dice, calls, at_once = random.Random(0), [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: calls.append(len(to)) or at_once(to, of))
    cache = allocate(GROUPS, 40, torch.float32, CPU)
    cache.storage.random_(0, 256)
    copies = [BlockCopy(dice.randrange(len(GROUPS)), *dice.sample(range(40), 2)) for _ in range(30)]
    expected = cache.storage.clone()
    for copy in copies:
        size = GROUPS[copy.group].block_bytes
        expected[copy.target, :size] = expected[copy.source, :size]
    KVPages(cache, GROUPS, lambda: None).copy(StepPlan(0, 0, [], [], [], [], copies=copies))
    assert torch.equal(cache.storage, expected)
    assert sum(calls) == 30 and 1 < len(calls) < 30


def test_within_an_attention_chunk_lengths_on_the_host_are_those_on_the_device() -> None:
    """What the host knows of whole sequences is no length of a chunk, in which kernels see the tables of that chunk alone."""
    lengths, tables = [9, 40, 64], torch.arange(24, dtype=torch.int32).view(3, 8)
    start, context = torch.tensor([0, 1, 4, 5], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    meta = AttentionMetadata(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), start, context, tables, 3)
    meta.exact_lens = meta.host_lens = start.tolist(), lengths
    assert meta.once("plan", lambda: "of whole sequences")
    within = within_attention_chunk(meta, ChunkedLocalSpec(8, 1, 8, 4, 32))
    assert within.lens() == within.host_lens == (start.tolist(), within.context_lens.tolist()) == (start.tolist(), [9, 8, 32])
    assert within.block_tables.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15], [20, 21, 22, 23]]
    assert within.once("plan", lambda: "of a chunk") == "of a chunk" and meta.lens()[1] == lengths
