"""Servers of a cluster listen on every address, whichever versions of IP it has."""

import socket

import pytest
from starling_agent.contract import listening
from starling_agent.contract.config import AdminConfig, EndpointConfig
from starling_agent.contract.listening import listening_socket, url_here


def is_reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not listening.has_ipv6(), reason="the kernel has no IPv6")
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("::", {"127.0.0.1": True, "::1": True}),
        (EndpointConfig().host, {"127.0.0.1": True, "::1": True}),
        (AdminConfig(token_file="t").host, {"127.0.0.1": True, "::1": True}),
        ("127.0.0.1", {"127.0.0.1": True, "::1": False}),
        ("::1", {"127.0.0.1": False, "::1": True}),
    ],
)
def test_the_host_decides_which_addresses_are_reached(host: str, expected: dict[str, bool]) -> None:
    with listening_socket(host, 0) as found:
        found.listen()
        assert {address: is_reachable(address, found.getsockname()[1]) for address in expected} == expected


def test_a_kernel_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "has_ipv6", lambda: False)
    with listening_socket("::", 0) as found:
        found.listen()
        assert found.family == socket.AF_INET and is_reachable("127.0.0.1", found.getsockname()[1])


def test_a_port_in_use_is_an_error() -> None:
    with listening_socket("::", 0) as found:
        found.listen()
        with pytest.raises(OSError, match="in use"):
            listening_socket("::", found.getsockname()[1])


@pytest.mark.parametrize(("host", "url"), [("::", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("a.b", "a.b")])
def test_the_url_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert url_here(host, 80) == f"http://{url}:80"
