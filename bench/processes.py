"""Servers in processes of their own, for as long as a benchmark needs them."""

import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket

STARLING = (sys.executable, "-m", "starling_cli.main")
QUIET = ("--log-level", "warning", "--no-access-log", "--accept-seconds", "0", "--drain-seconds", "0")
END_SECONDS = 60


@dataclass(frozen=True)
class Running:
    """A server that listens on a port of this machine."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    @property
    def waited_seconds(self) -> float:
        """Returns how long its main thread has waited for a processor that others had."""
        _, waited, _ = Path(f"/proc/{self.pid}/schedstat").read_text().split()
        return int(waited) / 1e9


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process up to now, without those that it started."""
    return time.clock_gettime(((~pid) << 3) | 2)  # CPUCLOCK_SCHED of the process, as clock_getcpuclockid has it


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running(command: Sequence[str], port: int, path: str = "/ready") -> Iterator[Running]:
    """Runs a command until the end of the block, and yields once it answers 200 on `path`."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*command], stdout=output, stderr=output)
        try:
            _wait(process, f"http://127.0.0.1:{port}{path}")
            yield Running(port, process.pid)
        except NotReady as error:
            output.seek(0)
            sys.exit(f"{' '.join(command)}: {error}\n{output.read().decode(errors='replace')[-3000:]}")
        finally:
            process.terminate()
            process.wait(END_SECONDS)


class NotReady(Exception):
    """A server ended, or did not answer in time."""


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise NotReady(f"it ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise NotReady("it did not become ready")


def serve(model: Path, port: int, threads: int, *options: str) -> list[str]:
    """Returns the command of a server of a model, by the name `m`."""
    named = ("--port", str(port), "--served-model-name", "m", "--num-threads", str(threads))
    return [*STARLING, "serve", str(model), *named, *QUIET, *options]


def route(urls: Sequence[str], port: int, *options: str) -> list[str]:
    """Returns the command of a router that closes no connection by its age."""
    return [*STARLING, "router", *urls, "--port", str(port), "--connection-seconds", "0", *QUIET, *options]


def family(pid: int) -> list[int]:
    """Returns the process and its descendants, which may have sessions of their own."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found
