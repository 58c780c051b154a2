"""The token of the admin endpoint, read again when its file changes: a Secret is mounted as a file."""

import hashlib
import hmac
from pathlib import Path

import structlog

log = structlog.get_logger("starling.agent")


class AdminToken:
    """Fails closed: without a file, or with an empty one, no token matches."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp: tuple[int, ...] | None = None
        self._digest: bytes | None = None

    def matches(self, given: bytes) -> bool:
        """Compares digests in constant time: neither content nor length of the token can be timed."""
        self._read_if_changed()
        return self._digest is not None and hmac.compare_digest(_digest(given), self._digest)

    def _read_if_changed(self) -> None:
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp == self._stamp:
                return
            token = self._file.read_bytes().strip()
        except OSError as error:
            log.error("the admin token cannot be read; no request is let in", file=str(self._file), cause=str(error))
            self._stamp = self._digest = None
            return
        self._stamp, self._digest = stamp, _digest(token) if token else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
