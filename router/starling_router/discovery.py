"""Finds backends once a second: in a file, and by DNS, which has the addresses of a headless Service without a right elsewhere.

An address that is no longer in an answer is dropped. DNS that fails and a Service without pods look alike. So after an answer that
has none, addresses stay for KEPT_SECONDS, and longer only where a ready backend is: others may be another service's by then.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from starling_agent.contract.listening import authority
from starling_agent.file_stamp import file_stamp
from starling_engine.errors import ConfigError

from starling_router.watch import BackendWatch

PERIOD_SECONDS = 1.0
KEPT_SECONDS = 30.0
log = structlog.get_logger("starling.router")


@dataclass(frozen=True, slots=True)
class BackendsService:
    """The name that has the addresses of all backends, and their port."""

    host: str
    port: int


class BackendsFile:
    """URLs of backends in a file, one a line, read again when it changes. While it cannot be read, those of before stay."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError for a file that cannot be read, and for a line that is no URL. A file may be empty."""
        self._file = file
        self._stamp = file_stamp(file)
        self._urls = self._read()

    @property
    def urls(self) -> tuple[str, ...]:
        if (stamp := file_stamp(self._file)) != self._stamp:
            self._stamp = stamp
            try:
                self._urls = self._read()
                log.info("backends are read again", file=str(self._file), backends=len(self._urls))
            except ConfigError as error:
                log.error("the backends of before stay", cause=str(error))
        return self._urls

    def _read(self) -> tuple[str, ...]:
        try:
            lines = [line.strip() for line in self._file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._file} cannot be read: {error}", "backends_file") from None
        named = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
        return tuple(backend_url(line, "backends_file", f"{self._file}, line {number}: ") for number, line in named)


def backend_url(text: str, setting: str, where: str = "") -> str:
    """Returns a server's URL without what clients write behind it. Raises ConfigError for what is none."""
    try:
        parts = urlsplit(text)
        is_server = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 0) >= 0
    except ValueError:
        is_server = False
    if not is_server or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{where}must be http://HOST:PORT of a server, got {text[:200]!r}", setting)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


@dataclass(frozen=True, slots=True)
class BackendSources:
    """Sources of backends: URLs that are `given`, those of a file, and the addresses of a service."""

    given: tuple[str, ...] = ()
    file: BackendsFile | None = None
    service: BackendsService | None = None

    @property
    def urls(self) -> dict[str, str]:
        """URLs that are known now without DNS, by name: themselves."""
        return {url: url for url in (*self.given, *(self.file.urls if self.file is not None else ()))}

    @property
    def may_change(self) -> bool:
        return self.file is not None or self.service is not None


class Discovery:
    """Sets the backends of `watch` to those of `sources`."""

    def __init__(self, watch: BackendWatch, sources: BackendSources, looked: Callable[[], None] = lambda: None) -> None:
        """`looked` is called after each look, whether it has found any."""
        self._watch, self._sources, self._looked = watch, sources, looked
        self._found: dict[str, str] = {}
        self._answered_at: float | None = None
        self._failed = False

    async def run(self) -> None:
        """Looks until it is cancelled. Ends at once where all backends are given."""
        self._watch.set(self._sources.urls)
        while self._sources.may_change:
            if self._sources.service is not None:
                self._take(await _look_up(self._sources.service))
            self._watch.set({**self._sources.urls, **self._found})
            self._looked()
            await asyncio.sleep(PERIOD_SECONDS)
        self._looked()

    def _take(self, addresses: list[str]) -> None:
        """Notes the addresses that DNS has."""
        now = asyncio.get_running_loop().time()
        if bool(addresses) is self._failed:
            self._failed = not addresses
            log.info("backends are looked up" if addresses else "no backend is found", service=self._sources.service)
        if addresses:
            self._answered_at = now
            self._found = {address: f"http://{address}" for address in addresses}
        elif self._answered_at is None or now - self._answered_at >= KEPT_SECONDS:
            self._found = {name: url for name, url in self._found.items() if self._watch.is_ready(name)}


async def _look_up(service: BackendsService) -> list[str]:
    """Returns HOST:PORT of each address, none where the name has none or cannot be looked up."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(service.host, service.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for what is no name
        return []
    return sorted({authority(str(address[0]), service.port) for *_, address in found})
