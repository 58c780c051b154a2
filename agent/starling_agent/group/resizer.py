"""Resizers carry out changes of a group's size: one for cores that exchange experts, one for independent cores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from starling_engine.core.client import CoreClient
from starling_engine.elastic.change import SizeChange
from starling_engine.elastic.coordinator import Coordinator
from starling_engine.elastic.members import CorePool

from starling_agent.group.leader import Leader


class Resizer(Protocol):
    """Carries out one change at a time, and announces to all nodes which cores serve."""

    @property
    def data(self) -> int:
        """Data parallel ranks of the serving epoch; 0 before the first."""
        ...

    @property
    def epoch(self) -> int: ...

    @property
    def dead(self) -> str | None:
        """The cause for which a rank is lost; None while all live."""
        ...

    async def resize(self, change: SizeChange) -> None:
        """Enters each stage of `change`. Cancelling it before the commit undoes it.

        Raises StarlingError where the change failed; the group then has its old size.
        """
        ...


class EpochResizer:
    """A Resizer for cores that exchange experts: every change is a new epoch."""

    def __init__(self, leader: Leader, coordinator: Coordinator) -> None:
        self._leader = leader
        self._coordinator = coordinator

    @property
    def data(self) -> int:
        return self._coordinator.data

    @property
    def epoch(self) -> int:
        return self._coordinator.epoch

    @property
    def dead(self) -> str | None:
        return self._coordinator.dead

    async def resize(self, change: SizeChange) -> None:
        with _announced(self._leader, self, change.target):
            await self._coordinator.resize(change)


class IndependentResizer:
    """A Resizer for cores that do not know each other: a change only decides which of them take requests."""

    def __init__(self, leader: Leader, cores: CorePool) -> None:
        self._leader = leader
        self._cores = cores
        self._clients: list[CoreClient] = []

    @property
    def data(self) -> int:
        return len(self._clients)

    @property
    def epoch(self) -> int:
        return 0

    @property
    def dead(self) -> str | None:
        return next((client.failure for client in self._clients if client.failure is not None), None)

    async def resize(self, change: SizeChange) -> None:
        with _announced(self._leader, self, change.target):
            change.enter("waiting")
            self._clients += [client for client, _ in await self._cores.launch(range(self.data, change.target))]
            change.enter("releasing")
            leavers, self._clients = self._clients[change.target :], self._clients[: change.target]
            await self._cores.release(leavers)
            change.end_stage()


@contextmanager
def _announced(leader: Leader, resizer: Resizer, target: int) -> Iterator[None]:
    """Announces the target before a change, and after it the size that serves then."""
    leader.announce_size(resizer.data, target)
    try:
        yield
    finally:
        leader.announce_size(resizer.data, resizer.data)
