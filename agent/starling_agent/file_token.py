"""A token that programs of one owner share, read again when its file changes: a Secret is mounted as a file."""

import hashlib
import hmac
import re
from collections.abc import Callable
from pathlib import Path

import structlog
from starling_engine.errors import ConfigError

from starling_agent.file_stamp import file_stamp

_HEADER_VALUE = re.compile(rb"[ -~]+")
_UNREAD = object()
"""Stamp of a file that was not read yet; None is that of one which is not there."""
log = structlog.get_logger("starling.agent")


class FileToken:
    """Fails closed: without a file, or with an empty one, no token matches. `derive` makes the token of what is in the file."""

    def __init__(self, file: Path, derive: Callable[[bytes], bytes] = lambda token: token) -> None:
        self._file = file
        self._derive = derive
        self._stamp: object = _UNREAD
        self._token = b""

    @classmethod
    def required(cls, file: Path, setting: str) -> "FileToken":
        """Returns the token of a file that has one, fit for a header. Raises ConfigError with the setting's name."""
        token = cls(file)
        if not _HEADER_VALUE.fullmatch(token.value):
            raise ConfigError(f"{file} must be a file with one line of printable ASCII", setting)
        return token

    @property
    def value(self) -> bytes:
        """The token; empty: there is none."""
        if (stamp := file_stamp(self._file)) != self._stamp:
            self._stamp, self._token = stamp, self._read()
            if stamp is None:  # whatever was read came later, and is there when it has a stamp
                self._token = b""
        return self._token

    def matches(self, given: bytes) -> bool:
        """Compares digests in constant time: neither content nor length of the token can be timed."""
        token = self.value
        return bool(token) and hmac.compare_digest(_digest(given), _digest(token))

    def _read(self) -> bytes:
        try:
            token = self._file.read_bytes().strip()
        except OSError as error:
            log.error("the token cannot be read, so there is none", file=str(self._file), cause=str(error))
            return b""
        if token and not _HEADER_VALUE.fullmatch(token):
            log.error("the token is not one line of printable ASCII, so there is none", file=str(self._file))
            return b""
        return self._derive(token) if token else b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
