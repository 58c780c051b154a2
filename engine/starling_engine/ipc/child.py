"""Child processes of the engine: a child's log goes to its parent, and it ends when the parent does."""

import ctypes
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from types import ModuleType

from starling_engine.ipc.log_lines import LogLineFormatter

PR_SET_PDEATHSIG = 1
"""See prctl(2)."""
YIELDING = {"OMP_WAIT_POLICY": "passive"}
"""Torch's threads sleep while they wait for each other, unless the environment says otherwise.

By default OpenMP has them spin for milliseconds, on the very CPU core that the thread they wait for may need. The native kernels
have their own.
"""

LOG_LEVEL = "STARLING_CHILD_LOG_LEVEL"
"""Variable with the level that a child's own loggers have, see `log_level`."""


def start(module: str, *arguments: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE ARGUMENTS`, which lives as long as its standard input is open; see `live_with_parent`.

    Ctrl-C goes to a terminal's whole process group: in a session of its own the child lives on until its parent has drained.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = YIELDING | os.environ | {LOG_LEVEL: str(log_level())}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, env=environment, start_new_session=True)


def log_level() -> int:
    """Returns the level for a child's loggers: this process's, but at least its info lines explain how it ended."""
    return min(logging.INFO, logging.getLogger("starling").getEffectiveLevel())


def import_for_good(name: str) -> ModuleType:
    """Imports a module that stays until the process ends.

    While another thread imports it, the module is not complete yet; an `import` of it waits for that thread.

    No garbage collection looks through it or what it imports, now or later: that is a sixth of the time that torch takes to import.
    """
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def live_with_parent(level: int | None = None) -> None:
    """Ends this process when its standard input ends, for then the parent is gone; call it when the input has been read.

    Interrupts are ignored: the parent drains first, then ends this process. `level` is that of its own loggers, by default the
    parent's when it started this process.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("starling").setLevel(int(os.environ.get(LOG_LEVEL, logging.INFO)) if level is None else level)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, also while this process is stopped.

    Only for children of a thread that lives as long as its process. Linux alone has it; elsewhere there is `live_with_parent`.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
