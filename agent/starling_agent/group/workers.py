"""Keeps the workers that run on this node for engine cores of others."""

import asyncio
from typing import Never

import structlog
from starling_engine.executor.launcher import WorkerHandle

from starling_agent.contract.group import GroupView
from starling_agent.group.membership import GroupMembership
from starling_agent.group.node_layout import NodeLayout

LOOK_SECONDS = 0.5
log = structlog.get_logger("starling.group")


class Workers:
    """One process for each such rank, started when its core says where to join, and anew when the core was.

    A worker that ends by itself is not started again for the same core: that ends too, for want of it, and comes back elsewhere.
    """

    def __init__(self, places: NodeLayout, membership: GroupMembership, host: str) -> None:
        self._ranks = places.workers_for_others(membership.node)
        self._membership = membership
        self._host = host
        self._running: dict[tuple[int, int], WorkerHandle] = {}

    @property
    def alive(self) -> bool:
        """Whether a core still needs one of them: they end when it does."""
        return any(worker.alive for worker in self._running.values())

    async def keep(self) -> Never:
        """Until it is cancelled; no worker is left then."""
        try:
            while True:
                if self._membership.view is not None:
                    await self._settle(self._membership.view)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for worker in self._running.values():
                worker.close()

    async def _settle(self, view: GroupView) -> None:
        if self._membership.is_draining:
            return  # A leader that starts now is another pod's, and would lose a worker of a node that goes.
        joining = joining_addresses(view)
        for place in self._ranks:
            core, rank = place
            address, worker = joining.get(core, ""), self._running.get(place)
            if not address or (worker is not None and worker.address == address):
                continue
            if worker is not None:
                await asyncio.to_thread(worker.close)
            self._running[place] = WorkerHandle(address, rank, self._host)
            log.info("started a worker", core=core, rank=rank, pid=self._running[place].pid, joining=address)


def joining_addresses(view: GroupView) -> dict[int, str]:
    """By data parallel rank, where its workers have to join."""
    return {core.rank: core.joining for member in view.members for core in member.cores if core.joining}
