"""A platform: the device that the engine runs on, and its limits."""

from typing import Protocol

import torch

from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.platforms.triton_support import GpuKind


class Platform(Protocol):
    """One kind of device. Cheap to make; memory is read again at each call."""

    name: str
    device: torch.device
    async_scheduling: bool
    """Default for planning a step while another one runs."""

    step_target_ms: int
    """Default for the time that a step with decodes may take; 0 for any time."""

    memory_fraction: float
    """Default for the engine's part of the memory."""
    shared_memory: bool
    """True where the device's memory is the host's, which all ranks of the machine share."""
    queue: DeviceQueue | None
    """The device's queue; None where the calling thread does the work."""

    def total_memory(self) -> int:
        """Returns the bytes that the engine could use if it were alone."""
        ...

    def available_memory(self) -> int:
        """Returns the bytes that are free now."""
        ...

    def keep_freed_memory(self) -> None:
        """Keeps the memory that a step frees for the next one. Called when all permanent memory is allocated."""
        ...

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype that this device cannot compute in."""
        ...

    def check_kv_dtype(self, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype in which this device cannot cache keys and values. It can in all that it computes in."""
        ...

    def compile_target(self) -> GpuKind | None:
        """Returns what Triton's kernels are compiled for; None where they are not."""
        ...

    def attention_backends(self) -> tuple[str, ...]:
        """Returns the names of backends that may work here, the preferred one first."""
        ...
