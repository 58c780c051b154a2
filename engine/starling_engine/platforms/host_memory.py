"""Host memory in whole pages, which can be pinned so that a device copies from and to it."""

import mmap
from contextlib import suppress

import torch

from starling_engine.byte_sizes import format_bytes


def anonymous(size: int) -> torch.Tensor:
    """Returns zeros, uint8 [size], page-aligned. They go back to the system with the tensor and all its views.

    Uses huge pages where the system has them: the first touch of a small one costs as much as copying it.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: torch.Tensor) -> None:
    """Pins memory of `anonymous` without copying it. Torch's own pinned memory is rounded up to a power of two, 40 GiB to 64.

    It must be unpinned before it is freed. Raises MemoryError.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        forget_error()
        raise MemoryError(f"{format_bytes(memory.nbytes)} of host memory cannot be pinned (CUDA error {error})")


def unpin(memory: torch.Tensor) -> None:
    """Undoes `pin`. No copy from or to the memory may be under way."""
    error = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]
    assert not error, f"CUDA error {error}: it was not pinned, or a copy has failed"


def forget_error() -> None:
    """Clears CUDA's last error. Torch reads that after each kernel, and would blame the next one."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").neg_()
