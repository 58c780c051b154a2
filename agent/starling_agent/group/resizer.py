"""Resizers carry out changes of a group's size: one for cores that share experts (EP), one for independent cores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from starling_engine.core.client import CoreClient
from starling_engine.elastic.coordinator import Coordinator, CorePool, SizeChange

from starling_agent.group.leader import Leader


class Resizer(Protocol):
    """Carries out one change at a time, and announces the old and the new size to all nodes."""

    @property
    def data(self) -> int:
        """Data parallel size that serves now; 0 before the first resize."""
        ...

    @property
    def epoch(self) -> int:
        """Number of the epoch that serves; always 0 for independent cores."""
        ...

    @property
    def dead(self) -> str | None:
        """Cause of the loss of a rank; None while all are alive."""
        ...

    async def resize(self, change: SizeChange) -> None:
        """Goes through the stages of `change`. Cancelling this call before the commit undoes the change.

        Raises StarlingError if the change fails; the group then has its old size.
        """
        ...


class EpochResizer:
    """A Resizer for cores that share experts (EP): every change is a new epoch."""

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
    """A Resizer for independent cores: a change only decides which of them take requests."""

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
    """Announces the target before a change, and the size that serves after it, even if it failed."""
    leader.announce_size(resizer.data, target)
    try:
        yield
    finally:
        leader.announce_size(resizer.data, resizer.data)
