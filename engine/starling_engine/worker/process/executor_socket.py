"""A worker's sockets to its executor: one for each thread that sends."""

import zmq


def executor_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, identity: bytes, linger_ms: int = 0
) -> "zmq.Socket[bytes]":
    """Makes a socket of name `identity` that can connect to `address`; `linger_ms` after its end it still sends."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.IPV6, "[" in address)
    return socket


def connect(context: "zmq.Context[zmq.Socket[bytes]]", address: str, identity: bytes, linger_ms: int = 0) -> "zmq.Socket[bytes]":
    """Makes a socket as `executor_socket` does, and connects it."""
    socket = executor_socket(context, address, identity, linger_ms)
    socket.connect(address)
    return socket
