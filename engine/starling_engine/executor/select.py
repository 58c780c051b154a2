"""Chooses the executor for a layout."""

from pathlib import Path

from starling_engine.config import EngineConfig, WorkerConfig
from starling_engine.executor.base import Executor
from starling_engine.executor.processes import ProcessExecutor
from starling_engine.executor.thread import ThreadExecutor

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Files that NVIDIA's driver makes, on Linux and in WSL. To query torch would take its import, which is the worker's."""


def make_executor(config: EngineConfig, folder: Path, host: str | None = None) -> Executor:
    """Makes the executor; `folder` is for sockets.

    With `host`, this node's address in a group of several, ranks that do not fit on it are processes of other nodes.
    """
    if needs_processes(config.worker, has_gpu=any(Path(file).exists() for file in GPU_FILES)):
        return ProcessExecutor(config.worker, config.progress_timeout, folder, host)
    return ThreadExecutor(config.worker)


def needs_processes(worker: WorkerConfig, *, has_gpu: bool) -> bool:
    """Returns whether ranks are processes, rather than one a thread of the engine core; `has_gpu` is the machine's.

    Several ranks are, and one that steps with those of other cores: it has to wake and wait for them while the core goes on.

    So is a rank whose device has a queue. While the device works, the host launches the next step, and the core plans and answers:
    both would wait for the interpreter's lock. A CPU's kernels release it. The queue of tests (`interpreter`) does all at once, so
    that a process gains nothing.
    """
    has_queue = worker.device == "cuda" or (worker.device == "auto" and has_gpu)
    return worker.layout.world_size > 1 or worker.dp_sync or has_queue
