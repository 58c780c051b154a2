"""Finds the request that made a step fail, by halves; no other request ends for it.

Its requests run again in steps of their own, half of them at a time, until each is past the token where the step failed. A half
that fails is halved again, and a request that fails alone is the culprit: log2(n) failing steps find one of n. All other requests
run on between these steps.
"""

from collections.abc import Sequence

from starling_engine.request_state import Gate, RequestState


class Suspects:
    """Requests behind `Gate.SUSPECT`, in groups, one of which is being tried."""

    def __init__(self) -> None:
        self._groups: list[list[RequestState]] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def tried(self) -> list[RequestState]:
        """The group to run in a step of its own now; empty if there is none."""
        return self._groups[-1] if self._groups else []

    @property
    def others(self) -> list[RequestState]:
        """The members of the groups that wait for theirs."""
        return [request for group in self._groups[:-1] for request in group]

    def add(self, failed: Sequence[RequestState]) -> None:
        """Adds the requests of a step that failed, in two halves. Members of the group that was tried are split again."""
        for request in failed:
            self.clear(request)
            request.gates.add(Gate.SUSPECT)
        middle = (len(failed) + 1) // 2
        self._groups += [list(half) for half in (failed[middle:], failed[:middle]) if half]

    def clear(self, request: RequestState) -> None:
        """Removes a request that is past the failure, or has ended."""
        if Gate.SUSPECT in request.gates:
            request.gates.discard(Gate.SUSPECT)
            for group in self._groups:
                if request in group:
                    group.remove(request)
            self._groups = [group for group in self._groups if group]

    def check_integrity(self) -> None:
        """Asserts that each suspect is in one group."""
        members = [id(request) for group in self._groups for request in group]
        assert len(members) == len(set(members)) and all(self._groups)
        assert all(Gate.SUSPECT in request.gates for group in self._groups for request in group)
