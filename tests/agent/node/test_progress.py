"""Progress in the report: the phase, and the time that is left."""

import pytest
from starling_agent.contract.report import Phase, Progress
from starling_agent.node.progress import ProgressReporter, eta, phase_of
from starling_agent.report_state import ReportState
from starling_engine.core.messages import Loading

from tests.agent.node.reports import starting_report


@pytest.mark.parametrize(
    ("began", "done", "total", "seconds", "left"),
    [
        (0, 50, 100, 10.0, 10.0),
        (50, 75, 100, 5.0, 5.0),
        (0, 100, 100, 10.0, 0.0),
        (0, 50, 100, 1.0, None),
        (0, 0, 100, 10.0, None),
        (50, 50, 100, 10.0, None),
        (0, 10, 0, 10.0, None),
    ],
)
def test_the_time_left_is_estimated_from_the_pace(began: int, done: int, total: int, seconds: float, left: float | None):
    assert eta(began, done, total, seconds) == left


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("starting", "loading"),
        ("init", "loading"),
        ("load", "loading"),
        ("allocate", "loading"),
        ("warm up", "warming"),
        ("?", "loading"),
    ],
)
def test_the_engines_phases_have_names_in_the_report(name: str, phase: Phase):
    assert phase_of(Loading(name)) == phase


def test_progress_is_reported_once_a_second_and_at_the_end():
    now = 0.0
    state = ReportState(starting_report(), lambda: 0)
    reporter = ProgressReporter(state, lambda: now)
    versions = []
    for step in range(101):
        now = step / 20
        reporter.report("loading", step, 100)
        versions.append(state.report.version)
    assert 5 <= len(set(versions)) <= 8
    assert state.report.progress == Progress(done=100, total=100, eta_seconds=0.0)
    reporter.report("warming")
    assert (state.report.phase, state.report.progress) == ("warming", None)
