"""Whether the server is on its way out."""

from dataclasses import dataclass


@dataclass(slots=True)
class Drain:
    """`draining` turns true at the first signal: unready from then on, and every answer closes its connection."""

    draining: bool = False
