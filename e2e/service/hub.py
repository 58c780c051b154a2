"""The hub of the agents' tests as a pod: each question what its main branch is moves that branch.

usage: hub.py FOLDER PORT     serves FOLDER as org/name; its log has a line for each request
"""

import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

# In the pod it lies beside this file.
from tests.agent.node.hub import Hub, _Handler


class PodHub(Hub):
    """A hub for other pods: it listens at all addresses, and tells what it is asked for."""

    def __init__(self, folder: Path, port: int) -> None:
        self._port = port
        super().__init__(folder)
        self.RequestHandlerClass = _Telling
        self.moves = True

    def server_bind(self) -> None:
        self.server_address = ("", self._port)
        super().server_bind()


class _Telling(_Handler):
    log_message = BaseHTTPRequestHandler.log_message


if __name__ == "__main__":
    PodHub(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
