"""A rank's host memory for chunks: the CPU tier, and what passes through on its way to and from the tiers outside."""

import ctypes
import mmap
import threading
from contextlib import suppress

import torch

from starling_engine.errors import ConfigError
from starling_engine.ledger import amount
from starling_engine.niceness import be_nice

MADV_POPULATE_WRITE = 23
"""Linux 5.14: gives memory its pages as if it had been written, and changes nothing in it."""
POPULATED_AT_ONCE = 16 << 20


class Arena:
    """`num_slots` slots of `slot_bytes` each, page-aligned.

    Where there is a device it is pinned, so that copies run beside its kernels, and has all its pages with that. Else the system
    gives them in the background, from the first slot on: a page that is new when a chunk is copied to it costs many times the
    copy. Raises ConfigError where so much cannot be pinned.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = num_slots * self.slot_bytes
        self._memory = torch.frombuffer(_anonymous(size), dtype=torch.uint8)
        self._view = memoryview(self._memory.numpy().data)
        if pinned:
            _pin(self._memory)
        else:
            threading.Thread(target=self._populate, name="kv-arena", daemon=True).start()

    def slot(self, number: int) -> torch.Tensor:
        """uint8 [slot_bytes]."""
        return self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def bytes(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a slot, without a copy."""
        return self._view[number * self.slot_bytes : number * self.slot_bytes + size]

    def _populate(self) -> None:
        be_nice()
        libc, start, size = ctypes.CDLL(None), self._memory.data_ptr(), self._memory.nbytes
        for at in range(0, size, POPULATED_AT_ONCE):
            count = min(POPULATED_AT_ONCE, size - at)
            if libc.madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(count), MADV_POPULATE_WRITE):
                return  # an older kernel: pages come when they are written


def _pin(memory: torch.Tensor) -> None:
    """Registers it as it is: torch's own pinned memory is rounded up to a power of two, 40 GiB to 64.

    It lives as long as the process, so nothing unregisters it. Raises ConfigError.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise ConfigError(
            f"{amount(memory.nbytes)} of host memory cannot be pinned (CUDA error {int(error)}); set it lower", "kv_cpu_bytes"
        )


def _anonymous(size: int) -> mmap.mmap:
    """In huge pages where the system has them: the first touch of a small one costs as much as copying it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
