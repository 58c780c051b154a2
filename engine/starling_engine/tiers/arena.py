"""A rank's host memory for chunks: the CPU tier, and what passes through on its way to and from the tiers outside."""

import mmap
from contextlib import suppress

import torch


class Arena:
    """`num_slots` slots of `slot_bytes` each, page-aligned; memory that the system gives when it is first written.

    Where there is a device it is pinned, so that copies run beside its kernels.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = num_slots * self.slot_bytes
        if pinned:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = torch.frombuffer(_anonymous(size), dtype=torch.uint8)
        self._view = memoryview(self._memory.numpy().data)

    def slot(self, number: int) -> torch.Tensor:
        """uint8 [slot_bytes]."""
        return self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def bytes(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a slot, without a copy."""
        return self._view[number * self.slot_bytes : number * self.slot_bytes + size]


def _anonymous(size: int) -> mmap.mmap:
    """In huge pages where the system has them: the first touch of a small one costs as much as copying it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
