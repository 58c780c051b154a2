"""Progress of a phase in the report, about once a second: a change with every byte would wake the operator in vain."""

import time
from collections.abc import Callable

from starling_engine.core.messages import Loading

from starling_agent.contract.report import Phase, Progress
from starling_agent.report_state import ReportState

REPORT_SECONDS = 1.0
MEASURE_SECONDS = 2.0
"""An estimate from less time than this is a guess."""

OnProgress = Callable[[Phase, int, int], None]
"""Takes a phase, and its bytes done and in total."""


def eta(began: int, done: int, total: int, seconds: float) -> float | None:
    """Returns the seconds left at the pace since `began`; None while that is not known."""
    if seconds < MEASURE_SECONDS or done <= began or total < done:
        return None
    return round((total - done) * seconds / (done - began), 1)


def phase_of(loading: Loading) -> Phase:
    """Returns the report's name of an engine's phase."""
    return "warming" if loading.phase == "warm up" else "loading"


class ProgressReporter:
    """Writes phase and progress into the report: a new phase and its end at once, steps between once a second."""

    def __init__(self, state: ReportState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._phase: Phase | None = None
        self._began_at = self._reported_at = 0.0
        self._began = 0

    def report(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        now = self._clock()
        # Bytes that were there before do not count for the pace, so an unknown total restarts the phase.
        if phase != self._phase or self._state.report.progress is None:
            self._phase, self._began, self._began_at, self._reported_at = phase, done, now, 0.0
        elif now - self._reported_at < REPORT_SECONDS and done != total:
            return
        self._reported_at = now
        self._state.update(phase=phase, progress=self._progress(done, total, now - self._began_at))

    def loading(self, loading: Loading) -> None:
        self.report(phase_of(loading), loading.done, loading.total)

    def _progress(self, done: int, total: int, seconds: float) -> Progress | None:
        if total <= 0:
            return None
        return Progress(done=min(done, total), total=total, eta_seconds=eta(self._began, done, total, seconds))
