"""The priority of background work."""

import os

import pytest
from starling_engine.ipc import priority


class Autogroup:
    """The kernel's file, which first refuses."""

    def __init__(self, refusals: list[OSError]) -> None:
        self.refusals = refusals
        self.written: list[str] = []

    def exists(self) -> bool:
        return True

    def write_text(self, text: str) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.written.append(text)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux shares processors among sessions")
@pytest.mark.parametrize(
    ("refusals", "leads", "written"),
    [
        ([BlockingIOError()] * 3, True, True),
        ([BlockingIOError()] * 100, True, False),
        ([PermissionError()], True, False),
        ([], False, False),
    ],
    ids=["soon", "never", "forbidden", "another's session"],
)
def test_a_process_makes_its_own_session_nicer_once_the_kernel_takes_it(
    refusals: list[OSError], leads: bool, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    autogroup = Autogroup(refusals)
    monkeypatch.setattr(priority, "AUTOGROUP", autogroup)
    monkeypatch.setattr(priority, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid() if leads else 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    priority.lower_priority_of_session()
    assert autogroup.written == ["13"] * written


@pytest.mark.parametrize(("processors", "niceness"), [(1, 10), (2, 13), (4, 16), (8, 19), (64, 19)])
def test_a_session_takes_as_little_as_a_thread_would_from_one_with_a_thread_on_each_processor(
    processors: int, niceness: int
) -> None:
    assert priority.session_niceness(processors) == niceness
