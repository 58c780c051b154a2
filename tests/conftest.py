"""Runs before any test module of the engine is imported."""

import gc
import importlib
import importlib.util
import os
from collections.abc import Hashable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import interpreter
from tests.matrices import Case, sample

TESTS = Path(__file__).parent
WAITING = ("agent", "charts", "cli", "examples", "operator", "router")
"""Folders of tests whose processes, and the API server, have to start and to answer."""

# Read when torch loads its OpenMP library. On shared CPUs, threads that spin while they wait for each other make small
# matrix products a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What is imported and collected stays to the end: to look through it again and again takes a sixth of the time.
gc.disable()


# The same examples every time: what fails here fails for whoever looks at it. `--hypothesis-profile=default` tries others.
# No time is too long: other work stalls an example now and then.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Triton decides when it is imported, as torch and others do, whether its own functions are interpreted; without a GPU the tests of
# kernels need them so.
if importlib.util.find_spec("triton") and not Path("/dev/nvidiactl").exists() and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("triton.language", "triton.experimental.gluon"):
        importlib.import_module(name)
    del os.environ["TRITON_INTERPRET"]
    interpreter.hasten()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole"):
        _leave_samples(items)
    _mix(items)


def _leave_samples(items: list[pytest.Item]) -> None:
    """Of each test that is marked as a matrix, leaves the cases of its sample."""
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in matrices.values():
        taken = set(sample([_case(case) for case in cases]))
        left_out |= {case for at, case in enumerate(cases) if at not in taken}
    items[:] = [item for item in items if item not in left_out]


def _case(item: pytest.Function) -> Case:
    """The values of its parameters; of one that cannot be compared, which object it is. Pytest counts its places by cases."""
    params = item.callspec.params
    return {name: value if isinstance(value, Hashable) else id(value) for name, value in params.items()}


def _mix(items: list[pytest.Item]) -> None:
    """Files of tests that mostly wait come evenly between those that compute: who shares the tests then shares the CPUs well."""
    files: dict[bool, dict[Path, list[pytest.Item]]] = {True: {}, False: {}}
    for item in items:
        waits = item.path.relative_to(TESTS.parent).parts[1] in WAITING
        files[waits].setdefault(item.path, []).append(item)
    waiting, computing = [*reversed(files[True].values())], [*files[False].values()]
    waiting.sort(key=lambda tests: tests[0].path.parent.name != "clients")  # some take minutes, which must not be the last
    places = [((at + 0.5) / len(row), tests) for row in (waiting, computing) for at, tests in enumerate(row)]
    items[:] = [test for _, tests in sorted(places, key=lambda place: place[0]) for test in tests]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path == item.path:
        return  # the count goes over millions of objects, which takes longer than most tests
    assert gc.get_freeze_count(), "a test that thaws the heap freezes it again, or each collection of later tests takes seconds"
