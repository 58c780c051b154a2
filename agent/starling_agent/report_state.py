"""The agent's report: one object whose version grows with every change."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from starling_agent.contract.report import Phase, Report

MAX_WAIT_SECONDS = 60.0
LAST_PHASE: Phase = "draining"
"""A node that drains keeps this phase and stays unready, whatever its engine does meanwhile."""

log = structlog.get_logger("starling.agent")


def changed(report: Report, **changes: Any) -> Report:
    """Returns the next version with the changes, or the same object if they change nothing. Pure."""
    unknown = changes.keys() - Report.model_fields.keys()
    assert not unknown, f"a report has no {', '.join(sorted(unknown))}"
    if all(getattr(report, name) == value for name, value in changes.items()):
        return report
    return report.model_copy(update={**changes, "version": report.version + 1})


class ReportState:
    """Written by the supervisor, read by the admin endpoint; both live on one event loop."""

    def __init__(self, report: Report, open_streams: Callable[[], int]) -> None:
        self._report = report
        self._open_streams = open_streams
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def report(self) -> Report:
        return self._report

    def current(self) -> Report:
        """Returns the report with the number of open streams, which has no version: it changes all the time."""
        return self._report.model_copy(update={"open_streams": self._open_streams()})

    def update(self, **changes: Any) -> None:
        before = self._report
        if before.phase == LAST_PHASE:
            changes = {name: value for name, value in changes.items() if name not in ("phase", "progress", "ready")}
        self._report = changed(before, **changes)
        if self._report is before:
            return
        if self._report.phase != before.phase:
            log.info("phase", phase=self._report.phase, cause=self._report.last_error)
        self._wake()

    async def wait(self, after: int, incarnation: str | None, seconds: float) -> Report:
        """Returns at once when the caller does not know this version, else at the next change or after `seconds`."""
        try:
            async with asyncio.timeout(min(max(seconds, 0.0), MAX_WAIT_SECONDS)):
                while self._is_known(after, incarnation) and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.current()

    def close(self) -> None:
        """Answers all callers that wait; later ones do not wait."""
        self._closed = True
        self._wake()

    def _is_known(self, after: int, incarnation: str | None) -> bool:
        return self._report.version <= after and incarnation in (None, self._report.incarnation)

    def _wake(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()
