"""The meeting point of a group's ranks, as it is sent to a worker. Pure: no torch, no processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A TCPStore at `host`:`port`, which rank 0 serves, and the address that this rank listens on.

    `timeout` is the seconds that a rank waits for another one, here and in every later call.
    """

    host: str
    port: int
    address: str
    timeout: float
