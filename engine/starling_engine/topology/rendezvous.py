"""Where the ranks of a group find each other. Pure: what is sent to a worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A key-value store at `host`:`port`, which rank 0 serves, and the address that this rank listens on.

    `timeout`, in seconds, is how long a rank waits for another one, here and in every later call.
    """

    host: str
    port: int
    address: str
    timeout: float
