"""Chooses the executor for a layout."""

from pathlib import Path

from starling_engine.config import EngineConfig, WorkerConfig
from starling_engine.executor.base import Executor
from starling_engine.executor.processes import ProcessExecutor
from starling_engine.executor.thread import ThreadExecutor

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""What NVIDIA's driver makes, on Linux and in WSL. To ask torch would take its import, which is the worker's."""


def make_executor(config: EngineConfig, folder: Path, host: str | None = None) -> Executor:
    """`folder` is for sockets. With `host`, this node's address in a group of several, ranks that do not fit on it are processes of
    other nodes.
    """
    if own_processes(config.worker, has_gpu=any(Path(file).exists() for file in GPU_FILES)):
        return ProcessExecutor(config.worker, config.progress_timeout, folder, host)
    return ThreadExecutor(config.worker)


def own_processes(worker: WorkerConfig, *, has_gpu: bool) -> bool:
    """Whether ranks are processes of their own, rather than one a thread of the engine core; `has_gpu` is the machine's.

    Several are, and one that steps with those of other cores: it has to wake and wait for them while the core goes on. So is one
    whose device has a queue: while the device works, the host launches the next step and the core plans and answers, which
    would hold each other up at the interpreter's lock. A CPU's kernels release it. The queue of tests (`interpreter`) does all at
    once, so that nothing is won.
    """
    queue = worker.device == "cuda" or (worker.device == "auto" and has_gpu)
    return worker.layout.world_size > 1 or worker.lockstep or queue
