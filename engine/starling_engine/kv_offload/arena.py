"""A rank's host memory for chunks, and copies between its slots and the pages of the KV cache.

A slot is the CPU tier's, or one that a chunk passes through on its way to and from the secondary tiers. It holds a chunk's keys and
values as [layers][runs][CHUNK tokens][row]. A run is one head's keys or one head's values, a row is those of one token. A page has
the same runs, of block_size tokens.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from starling_engine.errors import ConfigError
from starling_engine.ipc.priority import lower_priority
from starling_engine.kv.spec import KVGroup, StateGroup, pieces_of
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.native import ops, reference
from starling_engine.native.build import load
from starling_engine.platforms.host_memory import anonymous, pin


class Arena:
    """`num_slots` slots of `slot_bytes` each, page-aligned.

    Where there is a device it is pinned, so that copies run beside its kernels, and has all its pages with that. Else the system
    gives them in the background, from the first slot on: a page that is new when a chunk is copied to it costs many times the
    copy. Raises ConfigError where so much cannot be pinned.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = anonymous(num_slots * self.slot_bytes)
        self._view = memoryview(self._memory.numpy().data)
        if pinned:
            self._pin()
        else:
            threading.Thread(target=self._populate, name="kv-arena", daemon=True).start()

    def slot(self, number: int) -> Tensor:
        """uint8 [slot_bytes]."""
        return self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def bytes(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a slot, without a copy."""
        return self._view[number * self.slot_bytes : number * self.slot_bytes + size]

    def _pin(self) -> None:
        """Pins the memory for as long as the process lives."""
        try:
            pin(self._memory)
        except MemoryError as error:
            raise ConfigError(f"{error}; set it lower", "kv_cpu_bytes") from error

    def _populate(self, at_once: int = 16 << 20) -> None:
        lower_priority()
        populate_write = 23  # Linux 5.14: gives memory its pages as if it had been written, and changes nothing in it
        libc, start, size = ctypes.CDLL(None), self._memory.data_ptr(), self._memory.nbytes
        for at in range(0, size, at_once):
            count = min(at_once, size - at)
            if libc.madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(count), populate_write):
                return  # an older kernel: pages come when they are written


@dataclass(frozen=True)
class GroupPages:
    """The pages of a KV group on this rank: uint8 [num_blocks, runs, run_bytes], with the runs of all layers.

    All dimensions but the first are contiguous.
    """

    runs: Tensor
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk slot that this KV group uses."""
        _, runs, run_bytes = self.runs.shape
        return runs * run_bytes * self.blocks_per_chunk


def group_pages(groups: Sequence[KVGroup], slabs: Tensor, state: StateGroup | None = None) -> list[GroupPages]:
    """Returns each group's part of the `slabs`, uint8 [num_blocks, slab_bytes]; those of a state's pieces are whole slabs."""
    pieces = pieces_of(state, CHUNK // state.block_size) if state is not None else []
    return [*(_pages(group, slabs) for group in groups), *(GroupPages(slabs[:, None], blocks) for blocks in pieces)]


def _pages(group: KVGroup, slabs: Tensor) -> GroupPages:
    spec = group.spec
    runs = math.prod(spec.layer_block_shape[:-2])
    pages = slabs[:, : group.block_bytes].view(len(slabs), len(group.layers) * runs, spec.layer_block_bytes // runs)
    return GroupPages(pages, CHUNK // spec.block_size)


def copy_chunk(pages: GroupPages, blocks: list[int], first: int, slot: Tensor, *, to_pages: bool) -> None:
    """Copies pages to a slot, or back: `blocks` are the ids of the chunk's blocks from its `first`-th on. `slot` is on the host."""
    if not pages.chunk_bytes:
        return
    if pages.runs.device.type == "cpu":
        kernels = ops if load() is not None else reference
        kernels.copy_chunk(pages.runs, blocks, first, pages.blocks_per_chunk, slot, to_pages=to_pages)
    elif to_pages:
        _to_device(pages, blocks, first, slot)
    else:
        _from_device(pages, blocks, first, slot)


def _from_device(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    """All layers are gathered on the device, and come in one copy."""
    index = torch.tensor(blocks, device=pages.runs.device)
    gathered = _as_int64(pages.runs).index_select(0, index).transpose(0, 1).contiguous()
    _as_int64(_chunk(pages, slot))[:, first : first + len(blocks)].copy_(gathered, non_blocking=True)


def _to_device(pages: GroupPages, blocks: list[int], first: int, slot: Tensor) -> None:
    index = torch.tensor(blocks, device=pages.runs.device)
    arrived = _as_int64(_chunk(pages, slot))[:, first : first + len(blocks)].to(index.device, non_blocking=True)
    _as_int64(pages.runs).index_copy_(0, index, arrived.transpose(0, 1))


def _as_int64(data: Tensor) -> Tensor:
    """Views the memory as int64 where rows allow it: a device moves 8 bytes in the time of one."""
    return data.view(torch.int64) if data.shape[-1] % 8 == 0 else data


def _chunk(pages: GroupPages, slot: Tensor) -> Tensor:
    """The slot as [runs of all layers, blocks, bytes of a block's run]."""
    _, runs, run_bytes = pages.runs.shape
    return slot[: pages.chunk_bytes].view(runs, pages.blocks_per_chunk, run_bytes)


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
