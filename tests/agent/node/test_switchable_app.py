"""Answers of the endpoint while no engine serves, and counters over several engines."""

import pytest
from starling_agent.contract.report import PHASES, Phase, Progress
from starling_agent.node.metrics import added
from starling_agent.node.switchable_app import unavailable_error
from starling_engine.delta import Stats

from tests.agent.node.reports import starting_report


@pytest.mark.parametrize("phase", PHASES)
def test_clients_read_the_phase_and_the_cause_of_a_failure(phase: Phase):
    error = unavailable_error(starting_report(phase=phase, last_error="no such tensor"))
    assert error.status == 503 and phase in str(error)
    assert ("no such tensor" in str(error)) == (phase == "failed")


@pytest.mark.parametrize(("left", "wait"), [(None, "2"), (0.2, "1"), (7.2, "8"), (400.0, "30")])
def test_retry_after_is_the_estimated_time_left(left: float | None, wait: str):
    error = unavailable_error(starting_report(phase="loading", progress=Progress(done=1, total=4, eta_seconds=left)))
    assert error.headers["Retry-After"] == wait and "25 %" in str(error)


def test_totals_go_on_after_a_restart_and_gauges_do_not():
    past, now = Stats(running=3, steps_total=10, generated_tokens_total=5), Stats(running=1, steps_total=2)
    assert added(past, now) == Stats(running=1, steps_total=12, generated_tokens_total=5)
