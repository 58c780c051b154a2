"""The URL of a store: its master, and the memory that this engine brings along."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from starling_engine.byte_sizes import parse_bytes
from starling_engine.errors import ConfigError


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

    def __post_init__(self) -> None:
        if not self.metadata.startswith(("http://", "https://")):
            raise ValueError(f"metadata: must be an http:// URL, got {self.metadata!r}")
        if self.buffer < 1 << 20:
            raise ValueError(f"buffer: must be at least 1MiB, got {self.buffer} bytes")

    def __str__(self) -> str:
        return f"{_bracketed(self.master)}:{self.port}"


def parse_address(url: str) -> StoreAddress:
    """Raises ConfigError that gives the form of such a URL."""
    try:
        return _parse(url)
    except ValueError as error:
        options = "metadata=http://MASTER:8080/metadata&segment=0&buffer=256MiB&timeout=2&host=ADDRESS"
        form = f"a store is named mooncake://MASTER:PORT, with any of ?{options}"
        raise ConfigError(f"{error}; {form}, got {url!r}", "kv_store") from None


def _parse(url: str) -> StoreAddress:
    parts = urlsplit(url)
    if parts.scheme != "mooncake" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError("this names no store")
    options: dict[str, Any] = {"metadata": f"http://{_bracketed(parts.hostname)}:8080/metadata"}
    options |= {name: _option(name, text) for name, text in parse_qsl(parts.query, keep_blank_values=True)}
    return StoreAddress(master=parts.hostname, port=parts.port, **options)


def _option(name: str, text: str) -> Any:
    try:
        return _OPTIONS[name](text)
    except KeyError:
        raise ValueError(f"{name} is not known") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _seconds(text: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text) is None or float(text) == 0:
        raise ValueError("must be a number of seconds above 0")
    return float(text)


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "metadata": str,
    "segment": parse_bytes,
    "buffer": parse_bytes,
    "timeout": _seconds,
    "host": str,
}


def _bracketed(host: str) -> str:
    """Returns the host as in a URL: an address of IPv6 in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host else host
