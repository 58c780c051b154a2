"""How tests of the engine start its processes, and what these cost in a test's own."""

import gc
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from starling_engine.ipc import child
from starling_engine.ipc.collection import collect_everything

from tests import fork_server

start_program = child.start


@pytest.fixture(scope="session", autouse=True)
def as_forks() -> Iterator[None]:
    with patch.object(child, "start", fork_server.start):
        yield


@pytest.fixture(scope="session", autouse=True)
def short_collections() -> Iterator[None]:
    """Lets ranks that sleep in this process look through what came since the tests began: all that pytest holds takes seconds."""
    from starling_engine.worker.sleep import memory

    with patch.object(memory, "collect_everything", gc.collect):
        yield


@pytest.fixture
def whole_collections() -> Iterator[None]:
    """Lets them look through all, as ranks do that froze what they held when they were ready."""
    from starling_engine.worker.sleep import memory

    with patch.object(memory, "collect_everything", collect_everything):
        yield


@pytest.fixture
def programs() -> Iterator[None]:
    """Each starts as it does for users: `python -m`, a child of whoever started it."""
    with patch.object(child, "start", start_program):
        yield
