"""The workers that run on this node for engine cores of other nodes."""

import asyncio
from typing import Never

import structlog
from starling_engine.executor.launcher import WorkerHandle

from starling_agent.contract.group import GroupView
from starling_agent.group.membership import GroupMembership
from starling_agent.group.node_layout import NodeLayout

CHECK_SECONDS = 0.5
log = structlog.get_logger("starling.group")


class GroupWorkers:
    """Starts one process for each such rank when its core publishes where to join, and again when the core was started again.

    A worker that ends by itself is not started again for the same core: without it that core ends too, and is made again.
    """

    def __init__(self, node_layout: NodeLayout, membership: GroupMembership, host: str) -> None:
        self._ranks = node_layout.workers_for_others(membership.node)
        self._membership = membership
        self._host = host
        self._running: dict[tuple[int, int], WorkerHandle] = {}
        """Workers by their core's data parallel rank, and their rank within the core."""

    @property
    def alive(self) -> bool:
        """True while a core still needs one of them: they end when it does."""
        return any(worker.alive for worker in self._running.values())

    async def run(self) -> Never:
        """Runs until cancelled; all workers have ended then."""
        try:
            while True:
                if self._membership.view is not None:
                    await self._reconcile(self._membership.view)
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            for worker in self._running.values():
                worker.close()

    async def _reconcile(self, view: GroupView) -> None:
        if self._membership.is_draining:
            return  # A leader that starts now is another pod's, and would lose a worker of a node that ends.
        addresses = joining_addresses(view)
        for dp, rank in self._ranks:
            address, worker = addresses.get(dp, ""), self._running.get((dp, rank))
            if not address or (worker is not None and worker.address == address):
                continue
            if worker is not None:
                await asyncio.to_thread(worker.close)
            started = self._running[dp, rank] = WorkerHandle(address, rank, self._host)
            log.info("started a worker", core=dp, rank=rank, pid=started.pid, joining=address)


def joining_addresses(view: GroupView) -> dict[int, str]:
    """Returns, by data parallel rank, where the workers of its core join."""
    return {core.rank: core.joining for member in view.members for core in member.cores if core.joining}
