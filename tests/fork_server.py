"""Starts processes of the engine, agents and operators as forks of a server that has imported their modules already.

They run the same programs, in processes of their own; importing torch alone takes longer than most tests. Only their start and
their parent differ: tests of the engine that look at these ask for `programs`. Agents, and servers of `starling serve`, are forks
of a server that has no torch; their engine's processes are forks of the engine's. What `starling up` starts are programs with such
engines (`environment`). In the tests of the command line and on a cluster everything starts as it does for users.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from starling_engine.ipc import child

from tests import interpreter

ENGINE = ("starling_engine.worker.process.worker_process", "starling_engine.core.process")
OPERATOR = ("starling_operator.main", "starling_cli.commands.operator")
OPERATORS_LIBRARIES = ("kopf", "kubernetes.aio", "aiohttp", "prometheus_client", "pydantic", "typer", "yaml")
"""For an operator whose own modules are not imported yet: see tests/operator/shell/altered.py."""
AGENT = ("starling_cli.main", "starling_cli.commands.progress", "starling_agent.serve", "starling_agent.node.main")
FORKED = Path(__file__).with_name("forked")
LARGEST_REQUEST = 1 << 18
UCRED = struct.Struct("3i")
"""See unix(7): process, user, group."""


class Fork:
    """The part of `subprocess.Popen` that the engine uses. The server kills the fork when the process that asked for it is gone."""

    def __init__(self, connection: socket.socket, stdin: int) -> None:
        self.stdin = os.fdopen(stdin, "wb")
        self.stderr: BinaryIO | None = None
        self.pid = int(connection.recv(64))
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self.stdin, self._connection:
                self.returncode = int(self._connection.recv(64))
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and that is on its way here
                os.kill(self.pid, number)


def start(module: str, *arguments: str, stderr: int | None = None) -> Fork:
    """Stands in for `starling_engine.ipc.child.start`."""
    if stderr is None:
        return fork(ENGINE, [module, *arguments], 2)
    log = os.pipe()
    started = fork(ENGINE, [module, *arguments], log[1])
    os.close(log[1])
    started.stderr = os.fdopen(log[0], "rb")
    return started


def fork(modules: tuple[str, ...], command: list[str], stderr: int, folder: Path | None = None, **environment: str) -> Fork:
    """Runs `python -m COMMAND` in a fork of the server that has imported `modules`.

    The fork has this process's output and environment, with `environment` added, and its folder unless `folder` is another; it may
    write to the descriptor `stderr`. Variables that modules read as they are imported must never change.
    """
    everything = {**os.environ, **environment}
    request = {"command": command, "environment": everything, "folder": str(folder or Path.cwd())}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(_server(modules, everything) / "socket"))
    stdin = os.pipe()
    socket.send_fds(connection, [json.dumps(request).encode()], [stdin[0], 1, stderr])
    os.close(stdin[0])
    return Fork(connection, stdin[1])


SLOWLY = {"STARLING_TEST_FORK_SECONDS": "2"}
"""Environment of an agent which starts slowly, and its engine: for a test that has to see it load."""


def agent(arguments: list[str], log: Path, folder: Path, **environment_added: str) -> Fork:
    """Runs `starling ARGUMENTS`, an agent or a server, in a fork with its standard error in `log`.

    Its engine's processes are forks, too.
    """
    with log.open("wb") as errors:
        added = {**environment(), **environment_added}
        return fork(AGENT, ["starling_cli.main", *arguments], errors.fileno(), folder, **added)


def environment() -> dict[str, str]:
    """Returns the environment of a program whose engine processes are to be forks."""
    path = [str(FORKED), str(FORKED.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"STARLING_TEST_FORKS": str(_server(ENGINE, dict(os.environ))), "PYTHONPATH": os.pathsep.join(path)}


def join(folder: Path) -> None:
    """Starts this process's engine processes at the server in `folder`, which another process has started."""
    _servers[ENGINE] = folder


_servers: dict[tuple[str, ...], Path] = {}
"""Folders of the servers, by the modules that they have imported."""


def _server(modules: tuple[str, ...], environment: dict[str, str]) -> Path:
    if modules not in _servers:
        _servers[modules] = _start_server(modules, environment)
    return _servers[modules]


def _start_server(modules: tuple[str, ...], environment: dict[str, str]) -> Path:
    """Starts a server, which ends with this process; returns its folder."""
    folder = Path(tempfile.mkdtemp(prefix="starling-forks-"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(128)
        listener.set_inheritable(True)
        command = [sys.executable, "-m", "tests.fork_server", str(folder), str(listener.fileno()), *modules]
        descriptors = [listener.fileno()]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=descriptors, start_new_session=True)

    def end() -> None:
        process.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    return folder


def forks_of(parent: int) -> dict[int, list[str]]:
    """Returns the commands of the living forks that `parent` has started."""
    return {pid: fork["command"] for pid, fork in all_forks().items() if fork["parent"] == parent}


def pids_of(parent: int, module: str) -> list[int]:
    """Returns the living forks that `parent` has started from a module whose name contains `module`."""
    return [pid for pid, command in forks_of(parent).items() if module in command[0]]


def all_forks() -> dict[int, dict[str, Any]]:
    """Returns the engine's living forks by process id, in the order of their start: the request of each, and its parent."""
    found = {}
    for path in _servers[ENGINE].glob("*.fork"):
        with suppress(FileNotFoundError):
            found[int(path.stem)] = json.loads(path.read_text())
    return dict(sorted(found.items(), key=lambda item: item[1]["number"]))


class Server:
    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self._folder = folder
        self._started = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._fork)
        self._selector.register(sys.stdin, selectors.EVENT_READ, lambda _: sys.exit())

    def serve(self) -> NoReturn:
        """Runs until the parent is gone, or closes this process's standard input."""
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _fork(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        message, standard, *_ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
        if not message:  # who asks was killed before it could say what for
            connection.close()
            return
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            for key in [*self._selector.get_map().values()]:
                os.close(key.fd)  # its standard input too
            self._selector.close()
            connection.close()
            become(request, standard, self._folder)
        for descriptor in standard:
            os.close(descriptor)
        parent, _, _ = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        self._started += 1
        (self._folder / f"{pid}.new").write_text(json.dumps({**request, "parent": parent, "number": self._started}))
        (self._folder / f"{pid}.new").rename(self._folder / f"{pid}.fork")
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._kill, pid))
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, functools.partial(self._report_exit, pid, connection))
        with suppress(ConnectionError):  # who asked was killed, of which the connection tells next
            connection.send(str(pid).encode())

    def _kill(self, pid: int, connection: socket.socket) -> None:
        if connection.fileno() >= 0:  # else it has ended by itself at the same time
            self._selector.unregister(connection)
            os.kill(pid, signal.SIGKILL)

    def _report_exit(self, pid: int, connection: socket.socket, ended: int) -> None:
        self._selector.unregister(ended)
        os.close(ended)
        with suppress(KeyError):
            self._selector.unregister(connection)
        (self._folder / f"{pid}.fork").unlink()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with connection, suppress(ConnectionError):
            connection.send(str(code).encode())


def become(request: dict[str, Any], standard: list[int], folder: Path) -> NoReturn:
    try:
        os.setsid()
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        time.sleep(float(os.environ.get("STARLING_TEST_FORK_SECONDS", "0")))
        if os.environ.get("TRITON_INTERPRET") == "1":
            interpreter.hasten()
        fork_server = importlib.import_module("tests.fork_server")  # this program runs as __main__
        fork_server.join(Path(os.environ.get("STARLING_TEST_FORKS", folder)))
        child.start = fork_server.start
        module, *sys.argv[1:] = request["command"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:  # noqa: BLE001 - as an interpreter does, no frame of this program goes on
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def main() -> None:
    """`python -m tests.fork_server FOLDER LISTENER MODULE...`."""
    # numpy's own threads survive a fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # Run as a program it is executed anew.
    warnings.filterwarnings("ignore", "'starling_cli.main' found in sys.modules", RuntimeWarning)
    for module in sys.argv[3:]:
        child.import_for_good(module)
    Server(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))).serve()


if __name__ == "__main__":
    main()
