"""Chunks come from pages and go back alike, whoever copies: the native kernel, torch, and what a device is asked."""

import math

import pytest
import torch
from starling_engine.kv.spec import KVSpec, LatentSpec, WindowSpec, group_layers
from starling_engine.kv_offload import arena
from starling_engine.kv_offload.arena import CopyStream, GroupPages
from starling_engine.native import load, ops, reference
from starling_engine.worker.memory_plan import allocate

from tests.engine.slabs import assert_untouched, in_slabs

RUNS, RUN_BYTES, BLOCKS = 12, 32, 10
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))]


def pages_on(device: str, run_bytes: int = RUN_BYTES) -> GroupPages:
    torch.manual_seed(0)
    return GroupPages(in_slabs(torch.randint(0, 256, (BLOCKS, RUNS, run_bytes), dtype=torch.uint8).to(device)), blocks_per_chunk=4)


def slot_of(pages: GroupPages) -> torch.Tensor:
    return torch.zeros(pages.chunk_bytes + 64, dtype=torch.uint8, pin_memory=pages.runs.device.type == "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("blocks", "first"), [([7, 2, 9, 0], 0), ([5, 1], 2), ([3], 1)])
def test_a_device_copies_what_the_host_would(device: str, blocks: list[int], first: int) -> None:
    here, there = pages_on("cpu"), pages_on(device)
    expected, slot = slot_of(here), slot_of(there)
    reference.copy_chunk(here.runs, blocks, first, here.blocks_per_chunk, expected, to_pages=False)
    with CopyStream(torch.device(device)):
        arena._from_device(there, blocks, first, slot)
    assert torch.equal(slot[: there.chunk_bytes], expected[: here.chunk_bytes])

    targets = [(block + 1) % BLOCKS for block in blocks]
    reference.copy_chunk(here.runs, targets, first, here.blocks_per_chunk, expected, to_pages=True)
    with CopyStream(torch.device(device)):
        arena._to_device(there, targets, first, slot)
    assert torch.equal(there.runs.cpu(), here.runs)
    assert_untouched(there.runs)


@pytest.mark.skipif(load() is None, reason="the native kernels are not available here")
@pytest.mark.parametrize("run_bytes", [RUN_BYTES, 192])
def test_the_native_kernel_copies_what_torch_would(run_bytes: int) -> None:
    """It streams runs of whole cache lines, and copies others as they come."""
    one, other = pages_on("cpu", run_bytes), pages_on("cpu", run_bytes)
    slots = slot_of(one), slot_of(other)
    for copy_chunk, pages, slot in ((ops.copy_chunk, one, slots[0]), (reference.copy_chunk, other, slots[1])):
        copy_chunk(pages.runs, [8, 3, 6], 1, pages.blocks_per_chunk, slot, to_pages=False)
        copy_chunk(pages.runs, [2, 5, 4], 1, pages.blocks_per_chunk, slot, to_pages=True)
    assert torch.equal(*slots)
    assert torch.equal(one.runs, other.runs)
    assert_untouched(one.runs)


@pytest.mark.parametrize("kind", [KVSpec, LatentSpec])
def test_a_slot_has_a_groups_layers_then_runs_then_tokens(kind: type[KVSpec]) -> None:
    """Tiers keep these bytes for other engines. Layers of another group lie over the same slabs, in other blocks."""
    heads = 1 if kind is LatentSpec else 2
    specs = [kind(16, heads, 8, 4), WindowSpec(16, heads, 8, 4, 32), kind(16, heads, 8, 4), WindowSpec(16, heads, 8, 4, 32)]
    groups = group_layers(dict(enumerate(specs)))
    cache = allocate(groups, 6, torch.float32, torch.device("cpu"))
    cache.storage.random_(0, 120)
    pages, blocks = arena.group_pages(groups, cache.storage)[0], [4, 1, 5, 2]
    slot = torch.zeros(pages.chunk_bytes, dtype=torch.uint8)
    arena.copy_chunk(pages, blocks, 0, slot, to_pages=False)
    runs = math.prod(groups[0].spec.layer_block_shape[:-2])
    found = slot.view(torch.float32).view(2, runs, 64, 8)
    for index, layer in enumerate(groups[0].layers):
        tokens = torch.cat([cache.layers[layer][block].reshape(runs, 16, 8) for block in blocks], 1)
        assert torch.equal(found[index], tokens)
