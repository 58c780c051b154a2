"""Where events are published, as a user names it. Imports no ZeroMQ."""

import re
from typing import NamedTuple

from starling_engine.errors import ConfigError

REPLAY_PORT = 100
"""From the port of the events to that where they are asked for again: there is room for so many data parallel ranks between."""
FORM = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})(?:/(\S+))?")
LARGEST_PORT = 65535 - REPLAY_PORT


class EventEndpoint(NamedTuple):
    """`host` is * for all addresses of this machine, a name, or an address (of version 6 in brackets)."""

    host: str
    port: int
    topic: str

    @property
    def binds(self) -> bool:
        """Listeners connect here; else this connects to the one listener that there is. vLLM decides by the same signs."""
        return self.host == "*" or ":" in self.host


def parse_endpoint(text: str) -> EventEndpoint:
    """Raises ConfigError that says the form."""
    match = FORM.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= LARGEST_PORT:
        form = f"tcp://*:PORT or tcp://ADDRESS:PORT, and /TOPIC if listeners want one; PORT is at most {LARGEST_PORT}"
        raise ConfigError(f"must be {form}, got {text!r}", "kv_events")
    return EventEndpoint(match[1], int(match[2]), match[3] or "")
