"""The URL of a store: its master, and the memory that this engine brings along."""

import re
import socket
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from starling_engine.errors import ConfigError
from starling_engine.sizes import parse_bytes


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Address of a store; sizes are in bytes, for each rank.

    host     address at which others reach the memory that this rank adds to the store; by default the one that leads to the master
    segment  memory that this rank adds to the store while it runs; 0 leaves that to others
    buffer   memory through which values pass: no more than that is on its way at once
    timeout  seconds that one operation may take
    """

    master: str
    port: int
    metadata: str
    segment: int = 0
    buffer: int = 256 << 20
    timeout: float = 2.0
    host: str | None = None

    def __str__(self) -> str:
        return f"{bracketed(self.master)}:{self.port}"


def bracketed(host: str) -> str:
    """Returns the host as in a URL: an address of IPv6 in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host else host


def local_host(master: str, port: int) -> str:
    """Returns the address from which this machine reaches the master. Raises OSError where the master's name has no address."""
    family, _, _, _, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def parse_address(url: str) -> StoreAddress:
    """Raises ConfigError that gives the form of such a URL."""
    parts = urlsplit(url)
    try:
        master, port = parts.hostname, parts.port
    except ValueError:
        master, port = None, None
    if parts.scheme != "mooncake" or not master or not port or parts.path not in ("", "/"):
        raise _wrong(f"got {url!r}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    address = StoreAddress(
        master=master,
        port=port,
        metadata=options.pop("metadata", f"http://{bracketed(master)}:8080/metadata"),
        segment=_size(options.pop("segment", "0"), "segment"),
        buffer=_size(options.pop("buffer", "256MiB"), "buffer"),
        timeout=_seconds(options.pop("timeout", "2")),
        host=options.pop("host", None),
    )
    if options:
        raise _wrong(f"{next(iter(options))} is not known")
    if not address.metadata.startswith(("http://", "https://")):
        raise _wrong(f"metadata is an http:// URL, got {address.metadata!r}")
    if address.buffer < 1 << 20:
        raise _wrong(f"buffer must be at least 1MiB, got {address.buffer}")
    return address


def _size(text: str, name: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise _wrong(f"{name}: {error}") from None


def _seconds(text: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text) is None or float(text) == 0:
        raise _wrong(f"timeout is in seconds, above 0, got {text!r}")
    return float(text)


def _wrong(problem: str) -> ConfigError:
    options = "metadata=http://MASTER:8080/metadata&segment=0&buffer=256MiB&timeout=2&host=ADDRESS"
    return ConfigError(f"{problem}; a store is named mooncake://MASTER:PORT, with any of ?{options}", "kv_store")
