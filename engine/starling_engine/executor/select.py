"""Chooses the executor for a layout."""

from pathlib import Path

from starling_engine.config import EngineConfig
from starling_engine.executor.base import Executor
from starling_engine.executor.processes import ProcessExecutor
from starling_engine.executor.thread import ThreadExecutor


def make_executor(config: EngineConfig, folder: Path, host: str | None = None) -> Executor:
    """One rank runs in a thread of the engine core, several in processes of their own, with sockets in `folder`.

    With `host`, this node's address in a group of several, those that do not fit on it are processes of other nodes.

    So does one that steps with those of other cores: it has to wake and wait for them while the core goes on.
    """
    if config.worker.layout.world_size == 1 and not config.worker.lockstep:
        return ThreadExecutor(config.worker)
    return ProcessExecutor(config.worker, config.progress_timeout, folder, host)
