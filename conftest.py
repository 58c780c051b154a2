"""What tests and scenarios have in common."""

import socket

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run the whole of each matrix and scenario, not the sample of it")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Lets a process that shares the tests ask at once how often they failed: it asks the one that counts before and after each.

    Else Nagle's algorithm holds the second question back until the first is acknowledged, 40 ms later: longer than most tests take.
    """
    counts = getattr(config, "failures_db", None)  # of pytest-rerunfailures
    if hasattr(config, "workerinput") and counts is not None:
        counts.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked as whole. It comes last: samples of matrices are taken from all of their cases."""
    if not config.getoption("--whole"):
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
