"""A worker's connections to its executor: one for each thread that speaks to it."""

import zmq


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", address: str, identity: bytes, linger_ms: int = 0) -> "zmq.Socket[bytes]":
    """To be connected to `address`, by the name `identity`; for `linger_ms` after its end, it still sends what it was given."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.IPV6, "[" in address)
    return socket


def connect(context: "zmq.Context[zmq.Socket[bytes]]", address: str, identity: bytes, linger_ms: int = 0) -> "zmq.Socket[bytes]":
    """As `dealer`, and connected."""
    socket = dealer(context, address, identity, linger_ms)
    socket.connect(address)
    return socket
