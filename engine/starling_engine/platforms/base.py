"""What the engine asks of the machine that it runs on."""

from typing import Protocol

import torch

from starling_engine.platforms.queue import DeviceQueue


class Platform(Protocol):
    """One kind of device. Cheap to make; memory is read anew at each call."""

    name: str
    device: torch.device
    async_scheduling: bool
    """Whether planning a step while another runs pays when nobody says otherwise."""

    step_target_ms: int
    """About how long a step with decodes may take when nobody says otherwise; 0 for as long as it takes."""

    memory_fraction: float
    """Of the memory, for the engine, when nobody says otherwise."""
    shared_memory: bool
    """Whether it is the host's memory, which all ranks of the machine share."""
    queue: DeviceQueue | None
    """Where the device works on its own; None where the calling thread does the work."""

    def total_memory(self) -> int:
        """Bytes that the engine could use were it alone."""
        ...

    def available_memory(self) -> int:
        """Bytes that are free now."""
        ...

    def default_threads(self) -> int:
        """Threads for the work on the CPU."""
        ...

    def keep_scratch(self) -> None:
        """Called once what stays has been allocated: from now on memory that a step frees is kept for the next one."""
        ...

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype that this device cannot compute in."""
        ...

    def check_kv_dtype(self, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype in which this device cannot cache keys and values; any in which it computes, it can."""
        ...

    def attention_backends(self) -> tuple[str, ...]:
        """Names that may work here, the one to prefer first."""
        ...
