"""Chunks come from pages and go back alike, whoever copies: the native kernel, torch, and what a device is asked."""

import pytest
import torch
from starling_engine.kv_offload import arena
from starling_engine.kv_offload.arena import CopyStream, GroupPages
from starling_engine.native import load, ops, reference

LAYERS, RUNS, RUN_BYTES, BLOCKS = 3, 4, 32, 10
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))]


def pages_on(device: str) -> GroupPages:
    torch.manual_seed(0)
    layers = [torch.randint(0, 256, (BLOCKS, RUNS, RUN_BYTES), dtype=torch.uint8).to(device) for _ in range(LAYERS)]
    return GroupPages(layers, RUNS, RUN_BYTES, blocks_per_chunk=4)


def slot_of(pages: GroupPages) -> torch.Tensor:
    return torch.zeros(pages.chunk_bytes + 64, dtype=torch.uint8, pin_memory=pages.layers[0].device.type == "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("blocks", "first"), [([7, 2, 9, 0], 0), ([5, 1], 2), ([3], 1)])
def test_a_device_copies_what_the_host_would(device: str, blocks: list[int], first: int) -> None:
    here, there = pages_on("cpu"), pages_on(device)
    expected, slot = slot_of(here), slot_of(there)
    reference.copy_chunk(here.layers, blocks, first, here.blocks_per_chunk, expected, to_pages=False)
    with CopyStream(torch.device(device)):
        arena._from_device(there, blocks, first, slot)
    assert torch.equal(slot[: there.chunk_bytes], expected[: here.chunk_bytes])

    targets = [(block + 1) % BLOCKS for block in blocks]
    reference.copy_chunk(here.layers, targets, first, here.blocks_per_chunk, expected, to_pages=True)
    with CopyStream(torch.device(device)):
        arena._to_device(there, targets, first, slot)
    assert all(torch.equal(mine.cpu(), other) for mine, other in zip(there.layers, here.layers, strict=True))


@pytest.mark.skipif(load() is None, reason="the native kernels are not available here")
def test_the_native_kernel_copies_what_torch_would() -> None:
    one, other = pages_on("cpu"), pages_on("cpu")
    slots = slot_of(one), slot_of(other)
    for copy_chunk, pages, slot in ((ops.copy_chunk, one, slots[0]), (reference.copy_chunk, other, slots[1])):
        copy_chunk(pages.layers, [8, 3, 6], 1, pages.blocks_per_chunk, slot, to_pages=False)
        copy_chunk(pages.layers, [2, 5, 4], 1, pages.blocks_per_chunk, slot, to_pages=True)
    assert torch.equal(*slots)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.layers, other.layers, strict=True))
