"""NVIDIA GPUs through torch's CUDA: one device for each rank."""

import logging
from collections.abc import Callable
from contextlib import suppress

import torch

from starling_engine.errors import ConfigError
from starling_engine.platforms.device_queue import DeviceEvent, DeviceQueue, Replay
from starling_engine.platforms.triton_support import GpuKind, why_not_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16_CAPABILITY = (8, 0)
"""Ampere, the first whose matrix units know bfloat16."""
FP8_CAPABILITY = (8, 9)
"""Ada, the first that converts from and to float8_e4m3fn."""


MEASURED_CAPTURES = 5
"""The first brings workspaces. Memory is taken in pages, so that one more alone would say little."""

PAGE = 2 << 20
"""Bytes in which the driver takes memory. Of one that the first capture has begun, the others may have filled the rest."""

logger = logging.getLogger("starling.worker")


class CudaPlatform:
    """One GPU; see `Platform`. `index` is the device's number among those that this process sees."""

    name = "cuda"
    async_scheduling = True
    step_target_ms = 40
    memory_fraction = 0.9
    shared_memory = False

    def __init__(self, index: int = 0) -> None:
        count = torch.cuda.device_count()
        if index >= count:
            raise ConfigError(f"rank {index} of this node has no GPU of its own: torch sees {count}", "device")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self.queue: DeviceQueue | None = CudaQueue(self.device)

    def total_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    def available_memory(self) -> int:
        """Returns the bytes that are free, or that torch keeps for this process without using them."""
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + kept

    def keep_freed_memory(self) -> None:
        """Does nothing: torch's allocator keeps it anyway."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"{dtype} does not run on a GPU; possible: {', '.join(map(str, DTYPES))}", "dtype")
        capability = torch.cuda.get_device_capability(self.device)
        if dtype == torch.bfloat16 and capability < BF16_CAPABILITY:
            raise ConfigError(f"{torch.cuda.get_device_name(self.device)} has no bfloat16; possible: float16, float32", "dtype")

    def check_kv_dtype(self, dtype: torch.dtype) -> None:
        capability = torch.cuda.get_device_capability(self.device)
        if dtype == torch.float8_e4m3fn and capability < FP8_CAPABILITY:
            raise ConfigError(
                f"fp8 needs compute capability {'.'.join(map(str, FP8_CAPABILITY))} or more, and"
                f" {torch.cuda.get_device_name(self.device)} has {'.'.join(map(str, capability))}; possible: auto, int8, int4",
                "kv_cache_dtype",
            )

    def compile_target(self) -> GpuKind | None:
        if why_not_triton(self.device) is not None:
            return None
        properties = torch.cuda.get_device_properties(self.device)
        return GpuKind(10 * properties.major + properties.minor, properties.multi_processor_count)

    def attention_backends(self) -> tuple[str, ...]:
        return ("triton", "flash_attn", "flashinfer", "sdpa", "torch")


class CudaQueue:
    """The current stream of the thread that runs the steps. All graphs share one memory pool: they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record_event(self) -> DeviceEvent:
        # Blocking: a thread that waits for every step must not keep a CPU core of the pod busy.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaEvent(event, self._device)

    def capture(self, work: Callable[[], None]) -> Replay:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        # Threads that copy chunks may use CUDA meanwhile; only this one's calls are recorded.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except RuntimeError:
            # Where a call cannot be recorded torch restores neither the stream nor the pool, which then takes no more recordings.
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay

    def release_captures(self) -> None:
        # cuBLAS took workspaces from the pool while steps were recorded; a pool without recordings cannot be used again.
        torch._C._cuda_clearCublasWorkspaces()
        self._pool = torch.cuda.graph_pool_handle()

    def recording_bytes(self, work: Callable[[], None], count: int) -> int:
        """Returns what the first capture takes, libraries' workspaces included, and what executables of the others take."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free = [self._free()]
        replays: list[Replay] = []
        try:
            for _ in range(MEASURED_CAPTURES):
                replays.append(self.capture(work))
                replays[-1]()  # what a graph needs on the device may come with its first launch
                torch.cuda.synchronize(self._device)
                free.append(self._free())
        except RuntimeError as error:
            logger.warning("no memory is reserved for recorded steps, for none could be measured: %s", error)
            return 0
        finally:
            replays.clear()
            self.release_captures()
            torch.cuda.empty_cache()
        others = -(-(max(0, free[1] - free[-1]) + PAGE) // (MEASURED_CAPTURES - 1))
        return max(0, free[0] - free[1]) + (count - 1) * others

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        work()  # while tensors that the first run leaves, like logits, are there
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - before


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        # A new thread has the first device as its own, and a call would make a context there, which takes memory.
        with torch.cuda.device(self._device):
            self._event.synchronize()
