"""Starts the programs of a cluster in the background, and finds them again by a mark in their environment.

The mark outlives the harness, needs no file that could be lost, and is inherited by what a program starts (containerd's
shims); a process id on record may by now be another process.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from starling_cluster.errors import HarnessError
from starling_cluster.place import Place

CLUSTER = "STARLING_E2E_CLUSTER"
PROGRAM = "STARLING_E2E_PROGRAM"
START_SECONDS = 300


@dataclass(frozen=True)
class Running:
    """A process of a cluster."""

    pid: int
    cluster: Path
    program: str


def spawn(place: Place, name: str, command: list[str], namespace: str | None = None, *, urgent: bool = False) -> None:
    """Starts a program that stays when the harness ends; its output goes to log/NAME.log.

    One that is `urgent` gets a busy machine's CPUs first, where this user may say so: what has a time limit waits for it.
    """
    # Not `ip netns exec`: it mounts a new /sys, without the cgroups that kubelet needs.
    prefix = ["nsenter", f"--net=/run/netns/{namespace}"] if namespace else []
    if urgent:
        prefix += ["nice", "-n", "-10"]
    marked = {**os.environ, CLUSTER: str(place.directory), PROGRAM: name}
    with (place.make("log") / f"{name}.log").open("ab") as log:
        subprocess.Popen(
            [*prefix, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=marked, cwd="/", start_new_session=True
        )


def running() -> Iterator[Running]:
    """All processes of all clusters of this machine."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            pairs = (pair.partition(b"=") for pair in (entry / "environ").read_bytes().split(b"\0"))
            variables = {name: value for name, _, value in pairs if name in (CLUSTER.encode(), PROGRAM.encode())}
        except OSError:
            continue
        if cluster := variables.get(CLUSTER.encode()):
            yield Running(int(entry.name), Path(os.fsdecode(cluster)), os.fsdecode(variables.get(PROGRAM.encode(), b"")))


def kill_all(find: Callable[[], list[int]], seconds: float = 120) -> None:
    """Kills what `find` gives until it gives nothing: a process may start another between the look and the kill."""
    deadline = time.monotonic() + seconds
    while pids := find():
        if time.monotonic() > deadline:
            raise HarnessError(f"processes {pids} do not end; see /proc/PID/stack")
        for pid in pids:
            kill(pid)
        time.sleep(0.05)


def kill(pid: int) -> None:
    """Without a word when it has ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def of_cluster(place: Place, program: str | None = None) -> list[int]:
    """Ids of a cluster's processes, or of one program with all that it started. Never the caller's own."""
    return [
        process.pid
        for process in running()
        if process.cluster == place.directory and program in (None, process.program) and process.pid != os.getpid()
    ]


def wait_for(what: str, is_true: Callable[[], bool], log: Path | None = None, seconds: float = START_SECONDS) -> None:
    """Looks four times a second; on a time-out says what was waited for, with the end of the program's log."""
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log else ""
            raise HarnessError(f"{what}: not after {seconds:.0f} s\n{tail}".rstrip())
        time.sleep(0.25)
