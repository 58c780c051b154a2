"""Finds which request of a failed step is to blame, by halves; nobody else is ended for it.

Its requests are computed again in steps of their own, half of them at a time, until each is past the place where the step failed.
A half that fails is halved again, and a request that fails alone is the culprit: log2(n) failing steps find one of n. Everybody
else runs on between these steps.
"""

from collections.abc import Sequence

from starling_engine.request_state import Gate, RequestState


class Suspects:
    """Requests behind `Gate.SUSPECT`, in groups of which the first is being tried."""

    def __init__(self) -> None:
        self._groups: list[list[RequestState]] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def tried(self) -> list[RequestState]:
        """The group that a step of its own is to run now; empty when there is none."""
        return self._groups[-1] if self._groups else []

    def add(self, failed: Sequence[RequestState]) -> None:
        """Requests of a step that failed, by halves. Members of the group that was tried, if any, are suspected anew."""
        for request in failed:
            self.clear(request)
            request.gates.add(Gate.SUSPECT)
        middle = (len(failed) + 1) // 2
        self._groups += [list(half) for half in (failed[middle:], failed[:middle]) if half]

    def clear(self, request: RequestState) -> None:
        """It has passed where the step failed, or has ended."""
        if Gate.SUSPECT in request.gates:
            request.gates.discard(Gate.SUSPECT)
            for group in self._groups:
                if request in group:
                    group.remove(request)
            self._groups = [group for group in self._groups if group]

    def check_integrity(self) -> None:
        """Asserts that each is in one group."""
        members = [id(request) for group in self._groups for request in group]
        assert len(members) == len(set(members)) and all(self._groups)
        assert all(Gate.SUSPECT in request.gates for group in self._groups for request in group)
