"""One pod of this machine: an agent process, started again when it ends, until it is stopped."""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from starling_agent.contract.report import Report

from starling_cli.local.launch import Launch
from starling_cli.local.volumes import LaunchError

FIRST_BACKOFF, LONGEST_BACKOFF = 10.0, 300.0
PREPARE_PAUSE = 1.0
BACKOFF_RESET_SECONDS = 600.0
"""Length of a run after which pauses start from the beginning, as under a kubelet."""
TERMINATION_MESSAGE_BYTES = 2048
"""Bytes of the log's end that serve as termination message."""

Prepare = Callable[[], Launch]
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class LocalPod:
    """State that `observe` reads. Only `PodRunner` and the report's reader write it."""

    name: str
    group: str
    group_uid: str
    revision: str
    number: int
    folder: Path
    scratch: Path
    log: Path
    endpoint_port: int = 0
    admin_port: int = 0
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    created_at: float = field(default_factory=time.time)
    deleted_at: float | None = None
    launch: Launch | None = None
    pid: int | None = None
    restarts: int = 0
    waiting: str = ""
    termination_message: str = ""
    report: Report | None = None
    report_at: float | None = None

    @property
    def is_ready(self) -> bool:
        """True where clients may be sent here: the agent says that it is ready, and it has not been told to end."""
        return self.deleted_at is None and self.pid is not None and self.report is not None and self.report.ready


Pod = TypeVar("Pod", bound=LocalPod)


class PodRunner(Generic[Pod]):
    """Runs the process of one pod. `changed` is called after every change of its state."""

    def __init__(self, pod: Pod, prepare: Prepare, changed: Callable[[], None]) -> None:
        self.pod = pod
        self._prepare = prepare
        self._changed = changed
        self._stop = asyncio.Event()
        self._grace = 0.0
        """Seconds between the first signal and SIGKILL, once `stop` was called."""
        self._stop_signal = signal.SIGTERM
        self._task = asyncio.create_task(self._run(), name=pod.name)

    @property
    def is_gone(self) -> bool:
        return self._task.done()

    def stop(self, grace_seconds: float | None = None, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal, and SIGKILL after this grace, by default the template's."""
        if self.pod.deleted_at is None:
            self.pod.deleted_at = time.time()
            self._grace = grace_seconds if grace_seconds is not None else self._own_grace()
            self._stop_signal = number
            self._stop.set()
            self._end()
            self._changed()

    def kill(self) -> None:
        """Kills the process at once, with all processes that it started."""
        self._grace = 0.0
        self._stop.set()
        self._signal(signal.SIGKILL)

    def _end(self) -> None:
        """Ends the process. A pod that is stopped while it starts ends as soon as it has one."""
        if self.pod.pid is not None:
            self._signal(self._stop_signal if self._grace > 0 else signal.SIGKILL)
            asyncio.get_running_loop().call_later(self._grace, self.kill)

    async def wait(self) -> None:
        await asyncio.wait([self._task])

    def _own_grace(self) -> float:
        return self.pod.launch.grace_seconds if self.pod.launch else 0.0

    async def _run(self) -> None:
        pause: float | None = None
        while not self._stop.is_set():
            began = time.monotonic()
            started = await self._run_once()
            pause = _next_backoff(pause, time.monotonic() - began) if started else None
            await self._pause(PREPARE_PAUSE if pause is None else pause)
        self._changed()

    async def _run_once(self) -> bool:
        """Runs the process from start to end. False for a pod that cannot be prepared: it waits, and is tried again."""
        pod = self.pod
        try:
            pod.launch = self._prepare()
            process = await _start(pod, pod.launch)
        except (LaunchError, OSError) as error:
            pod.waiting = f"CreateContainerConfigError: {error}"
            self._changed()
            return False
        pod.pid, pod.waiting = process.pid, ""
        self._changed()
        if self._stop.is_set():
            self._end()
        code = await process.wait()
        # What it left behind (an engine core that hangs) goes with it.
        self._signal(signal.SIGKILL)
        pod.pid, pod.report, pod.report_at = None, None, None
        pod.termination_message = _termination_message(pod.log)
        # The end of a pod that was stopped is no restart.
        pod.restarts += not self._stop.is_set()
        pod.waiting = f"{_ended(code)}: {pod.termination_message.splitlines()[-1] if pod.termination_message.strip() else 'no log'}"
        self._changed()
        return True

    async def _pause(self, seconds: float) -> None:
        """Waits; `stop` ends the pause."""
        if seconds >= FIRST_BACKOFF:
            self.pod.waiting = f"CrashLoopBackOff: next try in {seconds:.0f} s; {self.pod.waiting}"
            self._changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to the agent, SIGKILL to its whole session."""
        if self.pod.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pod.pid, number)
            else:
                os.kill(self.pod.pid, number)


def _next_backoff(before: float | None, ran: float) -> float:
    """Returns 0 s for the first restart, then 10, 20, 40 .. 300 s. `before` is the last pause, None before the first."""
    if before is None or ran >= BACKOFF_RESET_SECONDS:
        return 0.0
    return min(LONGEST_BACKOFF, before * 2 or FIRST_BACKOFF)


async def _start(pod: LocalPod, launch: Launch) -> asyncio.subprocess.Process:
    """Starts the agent in a session of its own: ctrl-C in the terminal is for `starling up`, which stops the agents."""
    environment = {**os.environ, **launch.environment}
    with pod.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *launch.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def _termination_message(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TERMINATION_MESSAGE_BYTES))
        return file.read().decode(errors="replace").strip()


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    return f"ended by {signal.Signals(-code).name}"


def _end_with_parent() -> None:
    """Has the kernel send SIGTERM when `starling up` is gone, even if killed. Runs in the child, between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
