"""A real master of Mooncake Store, which tests stop, kill and start again on the same ports."""

import contextlib
import ctypes
import importlib.util
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1", "liburing.so.2", "libcurl.so.4")


def missing() -> str | None:
    """Returns what this machine lacks for a store, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake Store is not installed: pip install 'starling[store]'"
    for library in LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"no {library}: `make libraries` installs it, as root, on Debian and Ubuntu"
    return None


class Master:
    def __init__(self, folder: Path) -> None:
        self._log = folder / "master.log"
        self._ports = [free_port() for _ in range(3)]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._ports[0]}?metadata=http://127.0.0.1:{self._ports[1]}/metadata&buffer=16MiB"

    def start(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        rpc, metadata, metrics = self._ports
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    Path(spec.origin).with_name("mooncake_master"),
                    f"--rpc_port={rpc}",
                    "--enable_http_metadata_server=true",
                    "--http_metadata_server_host=127.0.0.1",
                    f"--http_metadata_server_port={metadata}",
                    f"--metrics_port={metrics}",
                ],
                stdout=log,
                stderr=log,
            )
        self._await(rpc)
        self._await(metadata)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops it: it takes connections meanwhile, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._await_stopped()
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _await_stopped(self) -> None:
        """Waits until each of its threads stands: the first one has to run for the others to get the signal."""
        assert self._process is not None
        for _ in range(1000):
            with contextlib.suppress(OSError):  # one has ended since it was listed
                stats = [stat.read_text() for stat in Path(f"/proc/{self._process.pid}/task").glob("*/stat")]
                if all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
                    return
            time.sleep(0.01)
        raise AssertionError("it goes on")

    def _await(self, port: int) -> None:
        assert self._process is not None
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            time.sleep(0.05)
        raise AssertionError(self._log.read_text()[-2000:])
