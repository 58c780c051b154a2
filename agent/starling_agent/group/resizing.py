"""Carries out changes of the group's size, on the node that leads it and while its engine lives."""

import asyncio
from collections.abc import Callable
from typing import Any, Never

import structlog
from starling_engine import AsyncEngine
from starling_engine.core.client import CoreClient
from starling_engine.elastic.change import SizeChange
from starling_engine.elastic.coordinator import Coordinator
from starling_engine.elastic.expert_space import ExpertSpace
from starling_engine.elastic.members import CorePool
from starling_engine.errors import EngineDead, EpochFailed

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.group import GroupView
from starling_agent.contract.scale import GroupSize
from starling_agent.group.core_pool import GroupCorePool
from starling_agent.group.leader import Leader
from starling_agent.group.operations import Operations, Resizer

AGAIN_SECONDS = 1.0
LOOK_SECONDS = 1.0
log = structlog.get_logger("starling.group")


class IndependentResizer:
    """Cores that know nothing of each other: to change their number is to say which of them take requests. A Resizer."""

    def __init__(self, cores: CorePool) -> None:
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
        change.enter("waiting")
        self._clients += [client for client, _ in await self._cores.launch(range(self.data, change.target))]
        change.enter("releasing")
        leavers, self._clients = self._clients[change.target :], self._clients[: change.target]
        await self._cores.release(leavers)
        change.end_stage()


class ReportedResizer:
    """`tell` takes changes of the report. What served last comes back when the engine was started again."""

    def __init__(self, leader: Leader, layout: LayoutConfig, operations: Operations, tell: Callable[..., Any]) -> None:
        self._leader = leader
        self._layout = layout
        self._operations = operations
        self._tell = tell
        self._served = 0 if layout.elastic is not None else layout.data

    async def lead(self, engine: AsyncEngine) -> Never:
        """Until it is cancelled. Raises EngineDead when the group cannot go on."""
        together = engine.config.worker.lockstep
        cores = GroupCorePool(self._leader, engine.config.progress_timeout, lockstep=together)
        resizer: Resizer = IndependentResizer(cores)
        if together:
            resizer = Coordinator(ExpertSpace.of(engine.model_config, engine.config), cores, engine.config.progress_timeout)
        leading = AnnouncingResizer(resizer, self._leader)
        try:
            await self._come_back(leading)
            self._operations.serve(leading)
            while True:
                self._served = leading.data or self._served
                self._tell(size=size_of(self._leader.view, self._layout, leading.data))
                if together and leading.dead is not None:
                    raise EngineDead(leading.dead)
                await self._leader.changed(LOOK_SECONDS)
        finally:
            self._operations.serve(None)
            self._leader.resize(0, 0)
            await cores.close()

    async def _come_back(self, leading: "AnnouncingResizer") -> None:
        """Nodes start again at different times, and what they said last may not hold any more."""
        while leading.data != self._served:
            try:
                await leading.resize(SizeChange(self._served))
            except (EpochFailed, EngineDead) as error:
                log.warning("the group is not together yet", size=self._served, cause=str(error))
                self._tell(last_error=str(error))
                await asyncio.sleep(AGAIN_SECONDS)


class AnnouncingResizer:
    """A Resizer that tells the nodes which cores serve."""

    def __init__(self, resizer: Resizer, leader: Leader) -> None:
        self._resizer = resizer
        self._leader = leader

    @property
    def data(self) -> int:
        return self._resizer.data

    @property
    def epoch(self) -> int:
        return self._resizer.epoch

    @property
    def dead(self) -> str | None:
        return self._resizer.dead

    async def resize(self, change: SizeChange) -> None:
        self._leader.resize(self.data, change.target)
        try:
            await self._resizer.resize(change)
        finally:
            self._leader.resize(self.data, self.data)


def size_of(view: GroupView, layout: LayoutConfig, effective: int) -> GroupSize:
    """In data parallel ranks."""
    workers = layout.tensor * layout.pipeline
    cores = {core.rank for member in view.members for core in member.cores}
    return GroupSize(allocated=len(view.members) * layout.per_node // workers, joined=len(cores), effective=effective)
