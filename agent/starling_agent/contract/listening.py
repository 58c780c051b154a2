"""Sockets that servers of the cluster listen on."""

import socket

EVERYWHERE = "::"
"""Every address of this machine, of IPv4 and of IPv6."""


def authority(host: str, port: int) -> str:
    """Returns HOST:PORT for a URL, an address of IPv6 in brackets (RFC 3986)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_here(host: str, port: int) -> str:
    """Returns the URL by which a program on this machine reaches a server that listens on `host`."""
    return f"http://{authority('127.0.0.1' if host in ('0.0.0.0', EVERYWHERE) else host, port)}"


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a bound TCP socket, which does not listen yet. `::` takes IPv4 too, and IPv4 alone where the kernel has no IPv6.

    Raises OSError.
    """
    if host != EVERYWHERE:
        return _bound(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)
    return _bound(socket.AF_INET6, host, port) if has_ipv6() else _bound(socket.AF_INET, "0.0.0.0", port)


def has_ipv6() -> bool:
    """Returns whether a socket can be bound to an address of IPv6: the kernel may have it and switch it off."""
    try:
        _bound(socket.AF_INET6, "::1", 0).close()
    except OSError:
        return False
    return True


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == EVERYWHERE:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
