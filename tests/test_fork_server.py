"""The server of forks outlives whoever asks it: all tests of a process have one."""

import json
import os
import socket
from pathlib import Path

import pytest

from tests import fork_server

MODULES = ("json.tool",)
COMMAND = ["json.tool", "--help"]


@pytest.mark.parametrize("says", [False, True], ids=["before it says for what", "before it is answered"])
def test_who_is_killed_while_it_asks_ends_no_server(says: bool) -> None:
    request = {"command": COMMAND, "environment": dict(os.environ), "folder": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, Path(os.devnull).open("r+b") as nothing:
        connection.connect(str(fork_server._server(MODULES, dict(os.environ)) / "socket"))
        if says:
            socket.send_fds(connection, [json.dumps(request).encode()], [nothing.fileno()] * 3)
    with Path(os.devnull).open("r+b") as nothing:
        assert fork_server.fork(MODULES, COMMAND, nothing.fileno()).wait(60) == 0
