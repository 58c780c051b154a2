"""A rank's host memory for chunks: the CPU tier, and what passes through on its way to and from the tiers outside."""

import ctypes
import mmap
import threading

import torch

from starling_engine.errors import ConfigError
from starling_engine.platforms.host_memory import anonymous, pin
from starling_engine.platforms.priority import lower_priority

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
        self._memory = anonymous(size)
        self._view = memoryview(self._memory.numpy().data)
        if pinned:
            self._pin()
        else:
            threading.Thread(target=self._populate, name="kv-arena", daemon=True).start()

    def slot(self, number: int) -> torch.Tensor:
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

    def _populate(self) -> None:
        lower_priority()
        libc, start, size = ctypes.CDLL(None), self._memory.data_ptr(), self._memory.nbytes
        for at in range(0, size, POPULATED_AT_ONCE):
            count = min(POPULATED_AT_ONCE, size - at)
            if libc.madvise(ctypes.c_void_p(start + at), ctypes.c_size_t(count), MADV_POPULATE_WRITE):
                return  # an older kernel: pages come when they are written
