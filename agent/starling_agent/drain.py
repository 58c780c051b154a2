"""The drain of a server."""

from dataclasses import dataclass


@dataclass(slots=True)
class Drain:
    """`draining` is set at the first signal. The server is unready then, and every answer closes its connection."""

    draining: bool = False
