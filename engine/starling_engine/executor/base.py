"""The interface between the engine core and the workers, and the choice of who implements it."""

from pathlib import Path
from typing import Protocol

from starling_engine.config import EngineConfig, WorkerConfig
from starling_engine.executor.processes import ProcessExecutor
from starling_engine.executor.thread import ThreadExecutor
from starling_engine.step import StepMasks, StepPlan, StepResult
from starling_engine.worker.commands import Command, Reply
from starling_engine.worker.messages import Phase, WorkerReport

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Files that NVIDIA's driver makes, on Linux and in WSL. To query torch would take its import, which is the worker's."""


class Executor(Protocol):
    """The ranks of one core. Plans run in the order of submission; results come back in the same order.

    All else goes over the control channel: `send` a command to all ranks, and get their merged `replies`.
    """

    @property
    def progress(self) -> int:
        """Grows while work advances, also inside a step; a supervisor watches it."""
        ...

    @property
    def phase(self) -> Phase: ...

    @property
    def joining(self) -> str:
        """Address that ranks on other nodes have to join; empty where there are none."""
        ...

    def start(self) -> None:
        """Begins to load; returns at once."""
        ...

    def ready(self, timeout: float) -> WorkerReport | None:
        """Returns the report once the workers are ready, None after `timeout` seconds. Raises the error that ended the loading."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands a plan over without waiting. At most the queue depth may be in flight."""
        ...

    def send_masks(self, masks: StepMasks) -> None:
        """Sends masks to the ranks that sample; for steps in their order, each once while it is in flight. Does not wait."""
        ...

    def collect(self, timeout: float) -> StepResult | None:
        """Returns the oldest result that was not collected yet; None after `timeout` seconds, or when there are replies."""
        ...

    def send(self, command: Command) -> None:
        """Sends a command to all ranks, behind the plans that were submitted; transfers go beside them. Does not wait.

        Commands of epochs are only for a core that steps with others. Memory orders are sent one after the other, each once no step
        is in flight.
        """
        ...

    def replies(self, timeout: float = 0.0) -> list[Reply]:
        """Returns all replies since the last call, each merged over the ranks; waits for the first at most `timeout` seconds."""
        ...

    def check(self) -> None:
        """Raises RankLost when a worker is gone, also while nothing is in flight. Cheap enough for every turn of a loop."""
        ...

    def shutdown(self) -> None: ...


def make_executor(config: EngineConfig, folder: Path, host: str | None = None) -> Executor:
    """Makes the executor; `folder` is for sockets.

    With `host`, this node's address in a group of several, ranks that do not fit on it are processes of other nodes.
    """
    if needs_processes(config.worker, has_gpu=has_gpu()):
        return ProcessExecutor(config.worker, config.progress_timeout, folder, host)
    return ThreadExecutor(config.worker)


def has_gpu() -> bool:
    """Returns whether this machine seems to have a GPU. Imports no torch."""
    return any(Path(file).exists() for file in GPU_FILES)


def needs_processes(worker: WorkerConfig, *, has_gpu: bool) -> bool:
    """Returns whether ranks are processes, rather than one a thread of the engine core; `has_gpu` is the machine's.

    Several ranks are, and one that steps with those of other cores: it has to wake and wait for them while the core goes on.

    So is a rank whose device has a queue. While the device works, the host launches the next step, and the core plans and answers:
    both would wait for the interpreter's lock. A CPU's kernels release it. The queue of tests (`interpreter`) does all at once, so
    that a process gains nothing.
    """
    has_queue = worker.device == "cuda" or (worker.device == "auto" and has_gpu)
    return worker.layout.world_size > 1 or worker.dp_sync or has_queue
