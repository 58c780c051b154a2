"""Memory of tensors that is given back and taken again while the tensors, and all views of them, stay the same objects."""

import ctypes
import gc
import mmap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import ismethod
from itertools import accumulate
from typing import Any

import torch

from starling_engine.platforms.cpu import M_TRIM_THRESHOLD, NEVER_TRIM
from starling_engine.platforms.host_memory import anonymous, pin, unpin

ALIGNMENT = 256
"""Bytes; of what a device allocates."""
OWN = "starling_engine."
NOT_OF_THE_MODEL = ("starling_engine.parallel.", "starling_engine.expert_parallel.")
"""Ranks outlive a model that they share."""
LOOKED_AT_FROM = 128 << 10
"""Bytes; glibc's FASTBIN_CONSOLIDATION_THRESHOLD is 64 KiB."""


def storages_of(model: object) -> list[torch.UntypedStorage]:
    """Every storage that the model's parts hold, once each, whatever the number of tensors in it.

    Follows attributes of the engine's own objects, containers and bound methods. A tensor in a library's own layout (oneDNN's) has
    no storage, and is passed over.
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
    if not kind.__module__.startswith(OWN) or kind.__module__.startswith(NOT_OF_THE_MODEL):
        return ()
    slots = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


class HostCopies:
    """Storages of a device whose content waits in a block of host memory, pinned so that it comes back at the bus's full speed."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], device: torch.device) -> None:
        """Copies first and gives back then: where host memory does not suffice, all is as it was. Raises MemoryError for what
        cannot be pinned.
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
        """Ends it. Where the device's memory does not suffice, all of that is given back again, and the copies stay."""
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
        """Gives the host's memory back with what is in it."""
        if self._pinned:
            torch.cuda.synchronize(self._device)  # it may still be copied from
            unpin(self._block)
        del self._copies, self._block

    @property
    def _pinned(self) -> bool:
        return self._device.type == "cuda"


class Pages:
    """The KV cache's storages: given back with what they hold, and zero when they are taken again.

    numpy's memory, which a CPU's cache lies in, cannot be resized: its pages go back to the system, which gives zeros for them at
    the next touch.
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
        """Where memory does not suffice, all of it is given back again."""
        try:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                if storage.nbytes() < size:
                    storage.resize_(size)
                    as_bytes(storage).zero_()
        except BaseException:
            self.release()
            raise


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [nbytes], the storage's own memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def discard_pages(address: int, size: int) -> None:
    """Zeroes private memory and gives its pages back (madvise(2), MADV_DONTNEED): those that lie in it whole. Raises OSError."""
    end = address + size
    first = min(-(-address // mmap.PAGESIZE) * mmap.PAGESIZE, end)
    last = max(end // mmap.PAGESIZE * mmap.PAGESIZE, first)
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, end - last)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if last > first and libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "pages could not be given back to the system")


def return_unused(device: torch.device) -> None:
    """What allocators keep for later goes back to the system: other processes are to have it."""
    gc.collect()  # parts of a model hold each other in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    else:
        _trim_own_arena()
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _trim_own_arena() -> None:
    """The end of the memory that glibc keeps for this thread, up to 64 MiB, which malloc_trim(3) leaves alone: it is looked at when
    what lies before it is freed, and a CPU's workers have told glibc to keep all of it (`CpuPlatform.keep_scratch`).
    """
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.malloc.restype = ctypes.c_void_p
        libc.mallopt(M_TRIM_THRESHOLD, 0)
        libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(LOOKED_AT_FROM))))
        libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
