"""Ports of this machine for what would have an address of its own in a cluster."""

import socket

LOCALHOST = "127.0.0.1"


def free_ports(count: int) -> tuple[int, ...]:
    """Different ports that were free a moment ago. The agent that cannot bind one ends, and starts again with others."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOCALHOST, 0))
        return tuple(int(probe.getsockname()[1]) for probe in probes)
    finally:
        for probe in probes:
            probe.close()
