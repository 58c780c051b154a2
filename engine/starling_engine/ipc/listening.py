"""Sockets that other nodes of a group connect to."""

import zmq

from starling_engine.errors import ConfigError


def listen(socket: "zmq.Socket[bytes]", host: str) -> str:
    """Binds a free port of `host`; returns the address to connect to. Raises ConfigError where this machine has no such address.

    The port is free, and not one of a fixed range: cores of several groups may share a machine's address, and a core that starts
    again must not be mistaken for the one before.
    """
    socket.setsockopt(zmq.IPV6, ":" in host)
    try:
        socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {host}: {error}", "host") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
