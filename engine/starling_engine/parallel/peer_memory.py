"""Device memory that other processes of the machine can read and write, through CUDA's IPC handles.

https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html (cudaIpcGetMemHandle). Not run yet.
"""

import ctypes
import functools

import torch

from starling_engine.errors import ConfigError

_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: opening lets this device reach the other one, where the machine can."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime that torch has loaded. Raises ConfigError where there is none."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise ConfigError(f"CUDA's runtime is not to be found ({error}); possible: cpu", "device") from error


class PeerMemory:
    """Memory of `size` bytes on the current device, zero at first. Freed when the process ends, since other ranks may use it."""

    HANDLE_BYTES = ctypes.sizeof(_Handle)

    def __init__(self, size: int) -> None:
        """Raises ConfigError with CUDA's message."""
        memory = ctypes.c_void_p()
        _check(_runtime().cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(size)), "cudaMalloc")
        _check(_runtime().cudaMemset(memory, 0, ctypes.c_size_t(size)), "cudaMemset")
        _check(_runtime().cudaDeviceSynchronize(), "cudaDeviceSynchronize")
        handle = _Handle()
        _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), memory), "cudaIpcGetMemHandle")
        self.handle = bytes(handle)
        """Opened by other processes."""
        self.address = memory.value or 0
        self.addresses: list[int] = []
        """Addresses of all ranks' memory in this process, by rank. Empty before `open`."""

    def open(self, handles: list[bytes], own: int) -> None:
        """Opens the memory of the other ranks. Raises ConfigError when this device cannot reach one of them."""
        self.addresses = [self.address if rank == own else _open(handle) for rank, handle in enumerate(handles)]


def _open(handle: bytes) -> int:
    memory, own = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
    result = _runtime().cudaIpcOpenMemHandle(ctypes.byref(memory), own, ctypes.c_uint(_LAZY_PEER_ACCESS))
    _check(result, "cudaIpcOpenMemHandle")
    return memory.value or 0


def _check(result: int, call: str) -> None:
    if result:
        _runtime().cudaGetErrorString.restype = ctypes.c_char_p
        words = _runtime().cudaGetErrorString(result).decode()
        raise ConfigError(f"{call}: {words}", "tensor_parallel_size")
