"""Copies chunks between a rank's pages and its slots.

A slot has a chunk's keys and values as [layers][runs][CHUNK tokens][row]: of keys and values, and of every head, one run; a page
has the same of fewer tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from starling_engine.kv.spec import KVGroup
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.native import ops, reference
from starling_engine.native.build import load


@dataclass(frozen=True)
class GroupPages:
    """The pages of a group's layers that are here: of each, uint8 [num_blocks, runs, bytes of a block's run]."""

    layers: list[Tensor]
    runs: int
    run_bytes: int
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a slot that this group uses."""
        return len(self.layers) * self.runs * self.run_bytes * self.blocks_per_chunk


def group_pages(groups: Sequence[KVGroup], kv: Sequence[Tensor]) -> list[GroupPages]:
    """`kv` has each layer's pages, of the layers that are here, in the order of layers."""
    place = {layer: at for at, layer in enumerate(sorted(layer for group in groups for layer in group.layers))}
    return [_pages(group, [kv[place[layer]] for layer in group.layers]) for group in groups]


def _pages(group: KVGroup, layers: list[Tensor]) -> GroupPages:
    spec = group.spec
    runs = math.prod(spec.page_shape[:-2])
    run_bytes = spec.page_bytes // runs
    flat = [layer.view(torch.uint8).view(len(layer), runs, run_bytes) for layer in layers]
    return GroupPages(flat, runs, run_bytes, CHUNK // spec.block_size)


def store_chunk(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    """Pages -> slot: `blocks` are the chunk's from its `first`-th on. `slot` is uint8, on the host."""
    _copy(pages, blocks, first, slot, to_pages=False)


def load_chunk(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    """Slot -> pages."""
    _copy(pages, blocks, first, slot, to_pages=True)


def _copy(pages: GroupPages, blocks: list[int], first: int, slot: Tensor, *, to_pages: bool) -> None:
    if not pages.layers:
        return
    if pages.layers[0].device.type == "cpu":
        copy_chunk = ops.copy_chunk if load() is not None else reference.copy_chunk
        copy_chunk(pages.layers, blocks, first, pages.blocks_per_chunk, slot, to_pages=to_pages)
    elif to_pages:
        _to_device(pages, blocks, first, slot)
    else:
        _from_device(pages, blocks, first, slot)


def _from_device(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    """All layers are gathered on the device, and come in one copy."""
    index = torch.tensor(blocks, device=pages.layers[0].device)
    gathered = torch.stack([_wide(layer).index_select(0, index).transpose(0, 1) for layer in pages.layers])
    _wide(_chunk(pages, slot))[:, :, first : first + len(blocks)].copy_(gathered, non_blocking=True)


def _to_device(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    index = torch.tensor(blocks, device=pages.layers[0].device)
    arrived = _wide(_chunk(pages, slot))[:, :, first : first + len(blocks)].to(index.device, non_blocking=True)
    for layer, part in zip(pages.layers, arrived, strict=True):
        _wide(layer).index_copy_(0, index, part.transpose(0, 1))


def _wide(data: Tensor) -> Tensor:
    """The same memory in elements of 8 bytes, where it can be: a device moves them as fast as single bytes."""
    return data.view(torch.int64) if data.shape[-1] % 8 == 0 else data


def _chunk(pages: GroupPages, slot: Tensor) -> Tensor:
    """The slot as [layers, runs, blocks, bytes of a block's run]."""
    return slot[: pages.chunk_bytes].view(len(pages.layers), pages.runs, pages.blocks_per_chunk, pages.run_bytes)


class CopyStream:
    """A thread's copies, beside what the device computes; when it is left, they have been made."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._before: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.cuda.current_stream(self._stream.device)
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None and self._before is not None:
            self._stream.synchronize()
            torch.cuda.set_stream(self._before)
