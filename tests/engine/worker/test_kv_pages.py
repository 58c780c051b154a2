"""Slabs: where layers lie in them, and what a copy of a block takes along."""

import torch
from starling_engine.kv.spec import KVSpec, WindowSpec, group_layers
from starling_engine.step import BlockCopy, StepPlan
from starling_engine.worker.host.kv_pages import KVPages
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
