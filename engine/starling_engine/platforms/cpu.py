"""The CPU as a platform, with the memory and threads that the cgroup allows."""

import ctypes
import os
from pathlib import Path

import torch

from starling_engine.errors import ConfigError
from starling_engine.platforms.cgroup import read_limits
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.platforms.triton_support import GpuKind

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # see mallopt(3)
NEVER_TRIM = (1 << 31) - 1


class CpuPlatform:
    """The host's CPUs and memory; see `Platform`. The limits are read once, what is used each time."""

    name = "cpu"
    # Scheduling the next step ahead would compete with the model for the same CPU cores.
    async_scheduling = False
    step_target_ms = 200
    memory_fraction = 0.5
    shared_memory = True  # the device's memory is the host's
    queue: DeviceQueue | None = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._limits = read_limits()

    def total_memory(self) -> int:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return machine if self._limits.memory is None else min(machine, self._limits.memory)

    def available_memory(self) -> int:
        machine = _machine_available()
        now = read_limits()
        return machine if now.memory is None else max(0, min(machine, now.memory - (now.memory_used or 0)))

    def keep_freed_memory(self) -> None:
        """Tells glibc to keep freed memory. Else the kernel zeroes pages for each large tensor, 3 to 8 % of a step's time.

        Other C libraries are left alone.
        """
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"{dtype} is not supported on a CPU; supported: {', '.join(map(str, DTYPES))}", "dtype")

    def check_kv_dtype(self, dtype: torch.dtype) -> None:
        """Allows every dtype: there is a backend that reads it."""

    def compile_target(self) -> GpuKind | None:
        """Returns None: on a CPU they are interpreted."""
        return None

    def attention_backends(self) -> tuple[str, ...]:
        return ("native", "torch", "triton")


def _machine_available() -> int:
    """Returns MemAvailable: free memory, and page cache that can be dropped."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
