"""How tests of the engine start its processes."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from starling_engine.ipc import child

from tests import fork_server

start_program = child.start


@pytest.fixture(scope="session", autouse=True)
def as_forks() -> Iterator[None]:
    with patch.object(child, "start", fork_server.start):
        yield


@pytest.fixture
def programs() -> Iterator[None]:
    """Each starts as it does for users: `python -m`, a child of whoever started it."""
    with patch.object(child, "start", start_program):
        yield
