"""A GPU's code path on a CPU, for tests: Triton's kernels in its interpreter, and a queue that does not wait."""

from collections.abc import Callable

import torch

from starling_engine.errors import ConfigError
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.device_queue import DeviceEvent, Replay
from starling_engine.platforms.triton_support import why_not_triton


class InterpretedPlatform(CpuPlatform):
    """Does everything as on a GPU, with the buffers of recorded steps, but at once. Very slow."""

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
    """Runs each call before it returns."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_event(self) -> DeviceEvent:
        return _Done()

    def capture(self, work: Callable[[], None]) -> Replay:
        return work

    def release_captures(self) -> None:
        """Does nothing: recordings take no memory."""

    def recording_bytes(self, work: Callable[[], None], count: int) -> int:  # noqa: ARG002 - they take no memory
        return 0

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        """Runs `work` once, and measures nothing."""
        work()
        return None


class _Done:
    def wait(self) -> None:
        """Returns at once: everything is done already."""
