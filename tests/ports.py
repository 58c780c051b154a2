"""Ports for servers of tests that have to be named before they listen."""

import secrets
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress

_PORTS = range(20_000, 29_000)
"""The kernel gives none of these to who wants any port, so what was free a moment ago still is."""


def free_port(also: Iterable[int] = ()) -> int:
    """Returns a port that is free, as are those with these distances from it."""
    while True:
        port = secrets.choice(_PORTS)
        with ExitStack() as stack, suppress(OSError):
            for each in (port, *(port + distance for distance in also)):
                stack.enter_context(socket.socket()).bind(("", each))
            return port
