"""What is planned for recorded steps is what they take, on GPUs of 80 and 141 GB of which only the memory is modelled.

Llama-3-8B runs on torch's meta device: each tensor's bytes count while it lives. Those of a recording go to the pool that
recordings share, and each of its launches takes some of an executable. The engine plans, allocates and records as on a GPU.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from starling_engine.config import WorkerConfig
from starling_engine.kernels.ahead import pretend
from starling_engine.kv.layer_specs import kv_groups
from starling_engine.parallel.absent import absent_ranks
from starling_engine.parallel.communicator import no_tick
from starling_engine.platforms.cuda import CudaPlatform, CudaQueue
from starling_engine.platforms.device_queue import DeviceEvent, Replay
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.platforms.triton_support import H200, GpuKind
from starling_engine.weights.dummy import load_dummy
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.masks import MaskQueue, StepMasking
from starling_engine.worker.memory_plan import allocate, kv_dtype, plan
from starling_engine.worker.setup import RankSetup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.shapes import model_folder
from tests.engine.kernels.compiled import in_compiler
from tests.engine.workers import plain_worker

pytestmark = pytest.mark.timeout(200)

GIB, PAGE = 1 << 30, 2 << 20
CONTEXT = 600 << 20
"""Bytes of the device that a process takes before it allocates: context and modules. A guess; the plan sees what is free."""
NODE, FULL_PAGES = 10 << 10, 9000
"""Bytes of an executable for a launch (NVIDIA/cccl, pull request 3768: "around 10KB per kernel node"); and so many that five
recordings end where a page does, which hides most of what the next one takes.
"""
WORKSPACE = 32 << 20
"""Bytes that cuBLAS takes in torch for a stream that it has not seen, on Hopper."""
ROUNDED = 512
"""Torch's allocator gives out so many bytes, or a multiple."""
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh", "_unsafe_view", "set_"}


class ModelledGpu:
    """Counts bytes of a device. `executables` are those of recordings, `pool` the most that one recording has held at once."""

    def __init__(self, total: int, node: int) -> None:
        self.total, self.node = total, node
        self.live = self.most_live = self.recorded = self.pool = self.executables = self.workspaces = self.nodes = 0
        self.recording = False
        self.least_free = total
        self._storages: set[int] = set()

    @property
    def free(self) -> int:
        executables = -(-self.executables // PAGE) * PAGE
        return self.total - CONTEXT - self.live - self.pool - executables - self.workspaces

    def take(self, storage: Any) -> None:
        """Counts a storage until it is freed; once, however often it is seen."""
        if storage._cdata in self._storages:
            return
        self._storages.add(storage._cdata)
        size = -(-storage.nbytes() // ROUNDED) * ROUNDED
        name = "recorded" if self.recording else "live"
        self._add(name, size)
        weakref.finalize(storage, self._give_back, storage._cdata, name, size)

    def _give_back(self, storage: int, name: str, size: int) -> None:
        self._storages.remove(storage)
        self._add(name, -size)

    def _add(self, name: str, size: int) -> None:
        setattr(self, name, getattr(self, name) + size)
        self.most_live = max(self.most_live, self.live)
        if self.recording:
            self.pool = max(self.pool, self.recorded)
        self.least_free = min(self.least_free, self.free)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what is allocated and launched meanwhile, in torch's own words for it."""
        from triton.runtime import JITFunction

        def launch(*_: object, **__: object) -> None:
            self.nodes += 1

        words: dict[str, Callable[..., object]] = {
            "mem_get_info": lambda _: (self.free, self.total),
            "memory_allocated": lambda _: self.live,
            "memory_reserved": lambda _: self.live,
            "max_memory_allocated": lambda _: self.most_live,
            "reset_peak_memory_stats": lambda _: setattr(self, "most_live", self.live),
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
        }
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(JITFunction, "run", launch))
            for name, word in words.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, word))
            stack.enter_context(_Counted(self))
            yield


class _Counted(TorchDispatchMode):
    """Counts new memory of operations, and those that are kernels."""

    def __init__(self, gpu: ModelledGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._gpu.nodes += func.overloadpacket.__name__ not in NO_KERNEL and not func.is_view
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._gpu.take(tensor.untyped_storage())
        return out


class ModelledQueue(CudaQueue):
    """Records on such a device. Nothing is replayed."""

    def __init__(self, gpu: ModelledGpu) -> None:
        self._gpu = gpu
        self._device = torch.device("meta")

    pinned = InlineQueue.pinned

    def record_event(self) -> DeviceEvent:
        return InlineQueue().record_event()

    def capture(self, work: Callable[[], None]) -> Replay:
        assert not gc.isenabled()
        gpu, before = self._gpu, self._gpu.nodes
        gpu.recording = True
        try:
            work()
        finally:
            gpu.recording = False
        gpu.executables += (gpu.nodes - before) * gpu.node
        gpu.workspaces = WORKSPACE
        gpu.least_free = min(gpu.least_free, gpu.free)
        if gpu.free < 0:
            raise torch.OutOfMemoryError(f"{-gpu.free} bytes too many")
        return lambda: None

    def release_captures(self) -> None:
        self._gpu.pool = self._gpu.executables = self._gpu.workspaces = 0


class ModelledPlatform(CudaPlatform):
    def __init__(self, gpu: ModelledGpu) -> None:
        self.device = torch.device("meta")
        self.queue = ModelledQueue(gpu)

    def check_dtype(self, dtype: torch.dtype) -> None:
        assert dtype == torch.bfloat16

    def check_kv_dtype(self, dtype: torch.dtype) -> None:
        assert dtype == torch.bfloat16

    def compile_target(self) -> GpuKind | None:
        return None


@dataclass(frozen=True)
class Recorded:
    """Bytes of the plan, and of what came of it; `not_recorded` counts sizes."""

    reserved: int
    activations: int
    executables: int
    pool: int
    largest: int
    least_free: int
    left: int
    kv: int
    not_recorded: int


def recorded(config: WorkerConfig, total: int, node: int) -> Recorded:
    """Plans, allocates and records on a device of so many bytes. Runs in the compiler."""
    pretend(H200)
    gpu = ModelledGpu(total, node)
    platform = ModelledPlatform(gpu)
    with torch.inference_mode(), gpu.counted():
        setup = RankSetup.choose(config, platform, lambda _: absent_ranks(config))
        model = setup.build_model(None)
        load_dummy(model, 0, platform.device)
        groups = kv_groups(setup.model, config)
        factory = setup.runner_factory(model, groups, None, no_tick, StepMasking(MaskQueue()))
        ledger = plan(factory, setup.dtype, 0)
        runner = factory.make(allocate(groups, ledger.num_blocks, kv_dtype(config), platform.device))
        assert isinstance(runner, DeviceRunner)
        gpu.least_free, before = gpu.free, gpu.live
        largest = runner.peak_bytes()
        assert largest is not None
        gpu.most_live = gpu.live
        runner.record()
        graphs = runner._graphs
        assert graphs is not None
        return Recorded(
            reserved=ledger.recordings,
            activations=ledger.activations,
            executables=gpu.executables + gpu.workspaces,
            pool=gpu.pool + gpu.live - before,
            largest=largest,
            least_free=gpu.least_free,
            left=ledger.left,
            kv=ledger.kv,
            not_recorded=graphs.not_recorded,
        )


def config_of(folder: Path, utilization: float, drafts: int = 0) -> WorkerConfig:
    return plain_worker(
        model_path=str(model_folder("Llama-3-8B", toy=False, root=folder)),
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=None,
        memory_fraction=utilization,
        num_speculative_tokens=drafts,
    )


def _whole(gigabytes: int, utilization: float, drafts: int, node: int = NODE) -> object:
    return pytest.param(gigabytes, utilization, drafts, node, marks=pytest.mark.whole)


@pytest.mark.parametrize(
    ("gigabytes", "utilization", "drafts", "node"),
    [
        (80, 0.98, 0, FULL_PAGES),
        *(_whole(80, utilization, 0) for utilization in (0.90, 0.95, 0.98)),
        *(_whole(141, utilization, 0) for utilization in (0.90, 0.95, 0.98)),
        _whole(80, 0.98, 3),
    ],
)
def test_every_size_is_recorded_in_what_is_reserved(
    gigabytes: int, utilization: float, drafts: int, node: int, tmp_path: Path
) -> None:
    found = in_compiler(recorded, config_of(tmp_path, utilization, drafts), gigabytes * 10**9, node)
    assert found.not_recorded == 0 and found.least_free >= 0, found
    assert found.reserved >= found.executables > WORKSPACE, found
    assert found.activations >= found.largest >= found.pool > 0, found
    assert found.kv > 0.5 * gigabytes * 10**9 * utilization and found.left < GIB, found
