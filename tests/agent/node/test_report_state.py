"""The report's version and long polls."""

import asyncio
from typing import Any

import pytest
from starling_agent.contract.report import Progress
from starling_agent.report_state import ReportState, changed

from tests.agent.node.reports import starting_report


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, 1),
        ({"phase": "starting"}, 1),
        ({"ready": False, "healthy": True, "ranks": []}, 1),
        ({"phase": "loading"}, 2),
        ({"phase": "loading", "ready": True}, 2),
        ({"last_error": "x"}, 2),
        ({"progress": Progress(done=1, total=2)}, 2),
    ],
)
def test_the_version_grows_only_with_a_change(changes: dict[str, Any], version: int):
    before = starting_report()
    after = changed(before, **changes)
    assert after.version == version
    assert (after is before) == (version == 1)


def test_a_change_of_an_unknown_field_is_a_bug():
    with pytest.raises(AssertionError, match="redy"):
        changed(starting_report(), redy=True)


async def test_a_node_that_drains_never_becomes_ready_again():
    state = ReportState(starting_report(), lambda: 7)
    state.update(phase="draining", ready=False)
    state.update(phase="serving", ready=True, last_error="died")
    assert (state.report.phase, state.report.ready, state.report.last_error) == ("draining", False, "died")
    assert state.current().open_streams == 7


async def test_a_long_poll_is_answered_with_the_next_change():
    state = ReportState(starting_report(), lambda: 0)
    poll = asyncio.create_task(state.wait(after=1, incarnation="i", seconds=30))
    await asyncio.sleep(0)  # it waits now
    state.update(phase="starting")
    await asyncio.sleep(0)  # it would have woken
    assert not poll.done()
    state.update(phase="loading")
    assert (await poll).version == 2


@pytest.mark.parametrize(("after", "incarnation"), [(0, None), (-1, "i"), (1, "another"), (5, "another")])
async def test_a_poll_with_an_old_version_is_answered_at_once(after: int, incarnation: str | None):
    state = ReportState(starting_report(), lambda: 0)
    async with asyncio.timeout(60):
        assert (await state.wait(after, incarnation, 30)).version == 1


@pytest.mark.parametrize("seconds", [0, 0.01, -5])
async def test_a_poll_without_a_change_is_answered_after_its_time(seconds: float):
    state = ReportState(starting_report(), lambda: 0)
    async with asyncio.timeout(60):
        assert (await state.wait(1, "i", seconds)).version == 1


async def test_polls_are_answered_at_once_when_the_agent_ends():
    state = ReportState(starting_report(), lambda: 0)
    poll = asyncio.create_task(state.wait(1, None, 30))
    await asyncio.sleep(0)  # it waits now
    state.close()
    async with asyncio.timeout(60):
        await poll
        await state.wait(1, None, 30)
