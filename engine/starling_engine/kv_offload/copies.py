"""Copies chunks between a rank's pages and its chunk slots.

A chunk slot holds a chunk's keys and values as [layers][runs][CHUNK tokens][row]. A run is one head's keys or one head's values, a
row is those of one token. A page has the same runs, of block_size tokens.
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
    """The pages of a KV group's layers on this rank: for each layer, uint8 [num_blocks, runs, run_bytes]."""

    layers: list[Tensor]
    runs: int
    run_bytes: int
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk slot that this KV group uses."""
        return len(self.layers) * self.runs * self.run_bytes * self.blocks_per_chunk


def group_pages(groups: Sequence[KVGroup], kv: Sequence[Tensor]) -> list[GroupPages]:
    """Sorts `kv`, the pages of each layer on this rank in the order of layers, by KV group."""
    index_of = {layer: index for index, layer in enumerate(sorted(layer for group in groups for layer in group.layers))}
    return [_pages(group, [kv[index_of[layer]] for layer in group.layers]) for group in groups]


def _pages(group: KVGroup, layers: list[Tensor]) -> GroupPages:
    spec = group.spec
    runs = math.prod(spec.page_shape[:-2])
    run_bytes = spec.page_bytes // runs
    flat = [layer.view(torch.uint8).view(len(layer), runs, run_bytes) for layer in layers]
    return GroupPages(flat, runs, run_bytes, CHUNK // spec.block_size)


def store_chunk(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    """Copies pages to a chunk slot: `blocks` are the ids of the chunk's blocks from its `first`-th on. `slot` is on the host."""
    _copy(pages, blocks, first, slot, to_pages=False)


def load_chunk(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    """Copies a chunk slot to pages; arguments as in `store_chunk`."""
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
    gathered = torch.stack([_as_int64(layer).index_select(0, index).transpose(0, 1) for layer in pages.layers])
    _as_int64(_chunk(pages, slot))[:, :, first : first + len(blocks)].copy_(gathered, non_blocking=True)


def _to_device(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    index = torch.tensor(blocks, device=pages.layers[0].device)
    arrived = _as_int64(_chunk(pages, slot))[:, :, first : first + len(blocks)].to(index.device, non_blocking=True)
    for layer, part in zip(pages.layers, arrived, strict=True):
        _as_int64(layer).index_copy_(0, index, part.transpose(0, 1))


def _as_int64(data: Tensor) -> Tensor:
    """Views the memory as int64 where rows allow it: a device moves 8 bytes in the time of one."""
    return data.view(torch.int64) if data.shape[-1] % 8 == 0 else data


def _chunk(pages: GroupPages, slot: Tensor) -> Tensor:
    """The slot as [layers, runs, blocks, bytes of a block's run]."""
    return slot[: pages.chunk_bytes].view(len(pages.layers), pages.runs, pages.blocks_per_chunk, pages.run_bytes)


class CopyStream:
    """Runs a thread's copies on a stream of their own, beside the model's; on exit, they have completed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._previous: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._previous = torch.cuda.current_stream(self._stream.device)
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None and self._previous is not None:
            self._stream.synchronize()
            torch.cuda.set_stream(self._previous)
