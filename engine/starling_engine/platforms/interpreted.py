"""The path of a GPU on a CPU, for tests: Triton's kernels in its interpreter, and a queue that does all at once."""

from collections.abc import Callable

import torch

from starling_engine.errors import ConfigError
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.queue import Mark, Replay
from starling_engine.platforms.triton_support import why_not_triton


class InterpretedPlatform(CpuPlatform):
    """Everything is done as on a GPU, with the buffers of recorded steps, but in the order in which it is asked. Very slow."""

    name = "interpreter"
    async_scheduling = True
    step_target_ms = 0

    def __init__(self) -> None:
        super().__init__()
        if (why := why_not_triton(self.device)) is not None:
            raise ConfigError(why, "device")
        self.queue = InlineQueue()

    def attention_backends(self) -> tuple[str, ...]:
        return ("triton", "torch")


class InlineQueue:
    """Has done what it was asked when the call returns."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        return _Passed()

    def record(self, work: Callable[[], None]) -> Replay:
        return work

    def forget(self) -> None:
        """There is nothing to give back."""

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        """The host's memory is not counted."""
        work()
        return None


class _Passed:
    def wait(self) -> None:
        """It has been passed."""
