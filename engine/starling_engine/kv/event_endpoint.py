"""The endpoint of KV events, as a user writes it. Imports no ZeroMQ."""

import re
from typing import NamedTuple

from starling_engine.errors import ConfigError

REPLAY_PORT_OFFSET = 100
"""Distance from the port of events to that of replays: the most data parallel ranks, which have a port each."""
FORM = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})(?:/(\S+))?")
LARGEST_PORT = 65535 - REPLAY_PORT_OFFSET


class EventEndpoint(NamedTuple):
    """An endpoint. `host` is * for all addresses of this machine, a name, or an address (IPv6 in brackets)."""

    host: str
    port: int
    topic: str

    @property
    def binds(self) -> bool:
        """True if listeners connect to this endpoint, False if it connects to its one listener. vLLM decides by the same signs."""
        return self.host == "*" or ":" in self.host


def parse_endpoint(text: str) -> EventEndpoint:
    """Raises ConfigError, which shows the form."""
    match = FORM.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= LARGEST_PORT:
        form = f"tcp://*:PORT or tcp://ADDRESS:PORT, and /TOPIC if listeners want one; PORT is at most {LARGEST_PORT}"
        raise ConfigError(f"must be {form}, got {text!r}", "kv_events")
    return EventEndpoint(match[1], int(match[2]), match[3] or "")
