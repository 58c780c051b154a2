"""Starts a worker for an executor on another node, and watches it. Imports no torch."""

import logging
import subprocess
import threading

from starling_engine.ipc import child
from starling_engine.ipc.log_lines import parse_line


class WorkerHandle:
    """Rank `rank` of the executor at `address`. `host` is this node's address, where the other ranks reach it.

    Its log is repeated here. It ends by itself when its executor is gone, or this process.
    """

    def __init__(self, address: str, rank: int, host: str) -> None:
        self.address = address
        self.rank = rank
        self._process = child.start("starling_engine.worker", address, str(rank), host, stderr=subprocess.PIPE)
        self._relay = threading.Thread(target=self._relay_messages, daemon=True)
        self._relay.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stderr is not None
        self._process.stdin.close()
        self._relay.join(timeout=1)
        self._process.stderr.close()

    def _relay_messages(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = parse_line(raw)
            level = logging.getLevelNamesMapping()[line.level]
            logging.getLogger(line.logger).log(level, "rank %d: %s", self.rank, line.message)
