"""A real API server for tests: `from tests.kube.apiserver import apiserver` in a conftest.py makes the fixture known there.

With STARLING_TEST_KUBECONFIG set, the tests run on that cluster and nothing is started.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HARNESS = (sys.executable, str(Path(__file__).parents[2] / "e2e" / "cluster"))
GIVEN = "STARLING_TEST_KUBECONFIG"


@pytest.fixture(scope="session")
def apiserver() -> Path:
    """The administrator's kubeconfig of an API server with the controller manager (StatefulSets, garbage collection, service
    accounts), but no nodes: pods stay Pending. One for the whole run, so a test makes a namespace of its own.
    """
    given = os.environ.get(GIVEN)
    return Path(given) if given else _shared()


@functools.cache
def _shared() -> Path:
    """One for all folders whose conftest.py imports the fixture: to pytest those are as many fixtures."""
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    return until_the_end.enter_context(started("--controllers"))


@contextmanager
def started(*options: str) -> Iterator[Path]:
    """The kubeconfig of an API server of one's own, for a test that breaks it; it ends with the block, or with this process."""
    # Not in pytest's folder: Unix sockets have short names only.
    folder = tempfile.mkdtemp(prefix="starling-kube-")
    try:
        _harness("up", folder, "--owner", str(os.getpid()), *options)
        yield Path(folder) / "kubeconfig"
    finally:
        _harness("down", folder)


def kubectl(kubeconfig: Path) -> list[str]:
    """The command, without which a test need not have kubectl installed."""
    beside = kubeconfig.parent / "bin" / "kubectl"
    return [str(beside) if beside.exists() else "kubectl", f"--kubeconfig={kubeconfig}"]


def _harness(verb: str, *arguments: str) -> None:
    done = subprocess.run([*HARNESS, "apiserver", verb, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
