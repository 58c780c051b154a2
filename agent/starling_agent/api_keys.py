"""API keys, which come from arguments, a file and the environment."""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

import structlog
from starling_engine.errors import ConfigError

from starling_agent.file_stamp import file_stamp

KEY_VARIABLE = "STARLING_API_KEY"
_SALT_PURPOSE = b"prefix cache"
log = structlog.get_logger("starling.agent")


class ApiKeys:
    """The keys that the endpoint accepts: fixed ones, and those of a file, read again when it changes. It may be a Secret.

    All keys are compared as digests and in constant time, so that the time reveals nothing. Fails closed: while the file is missing
    or has no key, only the fixed keys are accepted.
    """

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        """Raises ConfigError as `api_keys` does."""
        self._given = api_keys(given, None)
        self._file = file
        self._stamp: object = None
        self._set(_from_file(file) if file is not None else ())
        self._stamp = file_stamp(file) if file is not None else None

    def __bool__(self) -> bool:
        """True if requests need a key."""
        return bool(self._given) or self._file is not None

    @property
    def first(self) -> str | None:
        """A key that is valid now, for requests of this process to itself."""
        self._read_if_changed()
        return next(iter(self._keys), None)

    def knows(self, key: bytes) -> bool:
        self._read_if_changed()
        asked = _digest(key)
        matches = [hmac.compare_digest(asked, digest) for digest in self._digests]
        return any(matches)

    def _read_if_changed(self) -> None:
        if self._file is None or (now := file_stamp(self._file)) == self._stamp:
            return
        self._stamp = now
        try:
            self._set(_from_file(self._file))
            log.info("API keys read again", file=str(self._file), keys=len(self._keys))
        except ConfigError as error:
            log.error("no key of the file is let in", file=str(self._file), cause=str(error))
            self._set(())

    def _set(self, of_file: Sequence[str]) -> None:
        self._keys = tuple(dict.fromkeys((*self._given, *of_file)))
        self._digests = [_digest(key.encode()) for key in self._keys]


def cache_salt_of(key: bytes) -> str:
    """Returns a cache salt that is the same on every replica and after every restart, and does not reveal the key.

    Keys are compared by another digest, so that names in the cache do not help to guess a key.
    """
    return hashlib.blake2b(key, digest_size=16, person=_SALT_PURPOSE).hexdigest()


def tenant_owner(name: bytes) -> bytes:
    """Returns what stands for a tenant where its keys would stand. No key can be equal: none has a zero byte."""
    return b"tenant\0" + name


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def api_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Returns all keys, each once. The environment may have several, separated by commas; the file one a line, # for comments.

    Raises ConfigError for an empty key or a file that gives none: an endpoint must not stay open by mistake.
    """
    keys = [*given, *_from_environment(), *(_from_file(file) if file is not None else ())]
    if any(not key.strip() for key in keys):
        raise ConfigError("a key must not be empty", "api_key")
    return tuple(dict.fromkeys(key.strip() for key in keys))


def _from_environment() -> list[str]:
    value = os.environ.get(KEY_VARIABLE, "")
    return [key for key in value.split(",") if key.strip()]


def _from_file(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "api_key_file") from None
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{file} holds no key", "api_key_file")
    return keys
