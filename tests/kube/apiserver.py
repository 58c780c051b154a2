"""A real API server for tests: `from tests.kube.apiserver import apiserver` in a conftest.py makes the fixture known there.

With STARLING_TEST_KUBECONFIG set, the tests run on that cluster and nothing is started, but for tests that need one of their own.
"""

import atexit
import fcntl
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
WORKER = "PYTEST_XDIST_WORKER"
"""It is set in the processes that share the tests."""
COLLECTOR = {"GOGC": "400"}
"""Of a server that lives for minutes: to collect its garbage at every doubling takes an eighth of its time."""


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The administrator's kubeconfig of an API server with the controller manager (StatefulSets, garbage collection, service
    accounts), but no nodes: pods stay Pending. One for the whole run, also for tests of other processes that run at the same time:
    a test makes a namespace of its own, and has an API server of its own for what is in no namespace.
    """
    given = os.environ.get(GIVEN)
    if given:
        return Path(given)
    return of_all_workers(tmp_path_factory.getbasetemp().parent) if WORKER in os.environ else _of_this_process()


def of_all_workers(run: Path) -> Path:
    """One for all processes that share a run's tests, by the folder that these share: whoever needs it first starts it.

    It ends with their parent, which outlives each of them.
    """
    place = run / "apiserver"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            folder = tempfile.mkdtemp(prefix="starling-kube-")
            _harness("up", folder, "--owner", str(os.getppid()), "--controllers")
            place.write_text(folder)
    return Path(place.read_text()) / "kubeconfig"


@functools.cache
def _of_this_process() -> Path:
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
    command, environment = [*HARNESS, "apiserver", verb, *arguments], COLLECTOR | os.environ
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
