"""Releases and restores the memory of tensors, while the tensors and all views of them stay the same objects."""

import ctypes
import mmap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import ismethod
from itertools import accumulate
from typing import Any

import torch

from starling_engine.ipc.collection import collect_everything
from starling_engine.platforms.cpu import M_TRIM_THRESHOLD, NEVER_TRIM
from starling_engine.platforms.host_memory import anonymous, pin, unpin

ALIGNMENT = 256
"""Bytes, between copies: the alignment of a device's allocations."""
ENGINE = "starling_engine."
NOT_OF_THE_MODEL = ("starling_engine.parallel.", "starling_engine.expert_parallel.", "starling_engine.attention.triton_paged")
"""Ranks outlive a model that they share, and so does the attention backend, which has some KB of counters."""
TRIMS_FROM = 128 << 10
"""Bytes whose release makes glibc trim an arena: more than its FASTBIN_CONSOLIDATION_THRESHOLD of 64 KiB."""


def storages_of(model: object) -> list[torch.UntypedStorage]:
    """Returns every storage of the model's parts, once each, however many tensors it has.

    Follows attributes of the engine's own objects, containers and bound methods. Tensors in a library's own layout (oneDNN's) have
    no storage, and are skipped.
    """
    found: dict[int, torch.UntypedStorage] = {}
    seen: set[int] = set()
    left: list[object] = [model]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, torch.Tensor):
            left.extend(_parts(value))
        elif value.layout == torch.strided:
            storage = value.untyped_storage()
            found[storage._cdata] = storage
    return [storage for storage in found.values() if storage.nbytes()]


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if ismethod(value):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    kind = type(value)
    if not kind.__module__.startswith(ENGINE) or kind.__module__.startswith(NOT_OF_THE_MODEL):
        return ()
    slots = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


class HostCopies:
    """Storages of a device whose contents wait in a block of host memory, pinned so that they come back at the bus's full speed."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], device: torch.device) -> None:
        """Copies first and releases then: if host memory does not suffice, nothing changes.

        Raises MemoryError if memory cannot be pinned.
        """
        self._storages = list(storages)
        self._device = device
        sizes = [storage.nbytes() for storage in storages]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        self._block = anonymous(ends[-1])
        if self._pinned:
            pin(self._block)
        self._copies = [self._block[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]
        try:
            for storage, copy in zip(storages, self._copies, strict=True):
                copy.copy_(as_bytes(storage))
        except BaseException:
            self.drop()
            raise
        for storage in storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Copies all back and drops the copies. If the device's memory does not suffice, it is released and the copies stay."""
        try:
            for storage, copy in zip(self._storages, self._copies, strict=True):
                storage.resize_(copy.nbytes)
                as_bytes(storage).copy_(copy, non_blocking=True)
        except BaseException:
            for storage in self._storages:
                storage.resize_(0)
            raise
        self.drop()

    def drop(self) -> None:
        """Releases the host memory, and the copies in it."""
        if self._pinned:
            torch.cuda.synchronize(self._device)  # it may still be copied from
            unpin(self._block)
        del self._copies, self._block

    @property
    def _pinned(self) -> bool:
        return self._device.type == "cuda"


class Pages:
    """The KV cache's storages: released with their contents, and zero when restored.

    On a CPU they lie in numpy's memory, which cannot be resized. Its pages go back to the system, which gives zeros for them at the
    next access.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = storages_of(list(tensors))
        self._sizes = [storage.nbytes() for storage in self._storages]

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    def release(self) -> None:
        for storage in self._storages:
            if storage.device.type == "cpu":
                discard_pages(storage.data_ptr(), storage.nbytes())
            else:
                storage.resize_(0)

    def restore(self) -> None:
        """Takes the memory again. If it does not suffice, all of it is released."""
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                if storage.nbytes() < size:
                    storage.resize_(size)
                    as_bytes(storage).zero_()
        except BaseException:
            self.release()
            raise


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns the storage's own memory as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def discard_pages(address: int, size: int) -> None:
    """Zeroes private memory and gives whole pages of it back (madvise(2), MADV_DONTNEED). Raises OSError."""
    end = address + size
    first = min(-(-address // mmap.PAGESIZE) * mmap.PAGESIZE, end)
    last = max(end // mmap.PAGESIZE * mmap.PAGESIZE, first)
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, end - last)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if last > first and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "pages could not be given back to the system")


def return_unused(device: torch.device) -> None:
    """Returns memory that allocators hold for later to the system, for other processes."""
    collect_everything()  # a model's parts refer to each other in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    else:
        _trim_thread_arena()
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _trim_thread_arena() -> None:
    """Returns the end of this thread's arena, up to 64 MiB, which malloc_trim(3) leaves alone.

    glibc trims it when a large block before it is freed; a CPU's workers have switched that off (`CpuPlatform.keep_freed_memory`).
    """
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.malloc.restype = ctypes.c_void_p
        libc.mallopt(M_TRIM_THRESHOLD, 0)
        libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(TRIMS_FROM))))
        libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
