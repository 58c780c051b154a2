"""Host memory in whole pages of its own, which a device may copy from and to by itself."""

import mmap
from contextlib import suppress

import torch

from starling_engine.sizes import amount


def anonymous(size: int) -> torch.Tensor:
    """uint8 [size], zeros, page-aligned; given back to the system with the tensor and all its views.

    In huge pages where the system has them: the first touch of a small one costs as much as copying it.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: torch.Tensor) -> None:
    """Registers what `anonymous` gave, as it is: torch's own pinned memory is rounded up to a power of two, 40 GiB to 64.

    To be unpinned before it is given back. Raises MemoryError.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        forget_error()
        raise MemoryError(f"{amount(memory.nbytes)} of host memory cannot be pinned (CUDA error {error})")


def unpin(memory: torch.Tensor) -> None:
    """No copy from or to it may be under way."""
    error = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]
    assert not error, f"CUDA error {error}: it was not pinned, or a copy has failed"


def forget_error() -> None:
    """CUDA keeps the error of a call until it is asked for it, and torch asks after each kernel: the next one would be blamed."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").neg_()
