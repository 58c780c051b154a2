"""Brings a group to its size, on the leader and while its engine lives."""

import asyncio
from collections.abc import Callable
from typing import Any, Never

import structlog
from starling_engine import AsyncEngine
from starling_engine.elastic.coordinator import Coordinator, SizeChange
from starling_engine.elastic.epoch_plans import ExpertSpace
from starling_engine.errors import EngineDead, EpochFailed

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.group import GroupView
from starling_agent.contract.scale import GroupSize
from starling_agent.group.core_pool import GroupCorePool
from starling_agent.group.leader import Leader
from starling_agent.group.operations import Operations
from starling_agent.group.resizer import EpochResizer, IndependentResizer, Resizer

RETRY_SECONDS = 1.0
CHECK_SECONDS = 1.0
log = structlog.get_logger("starling.group")


class SizeController:
    """Restores the size that served last whenever the engine starts again, and has operations change it.

    `update_report` takes changes of the agent's report.
    """

    def __init__(self, leader: Leader, layout: LayoutConfig, operations: Operations, update_report: Callable[..., Any]) -> None:
        self._leader = leader
        self._layout = layout
        self._operations = operations
        self._update_report = update_report
        self._served = 0 if layout.elastic is not None else layout.data

    async def run(self, engine: AsyncEngine) -> Never:
        """Runs until cancelled. Raises EngineDead when the group cannot go on."""
        exchanges_experts = engine.config.worker.dp_sync
        cores = GroupCorePool(self._leader, engine.config.progress_timeout, standby_only=exchanges_experts)
        resizer: Resizer = IndependentResizer(self._leader, cores)
        if exchanges_experts:
            space = ExpertSpace.of(engine.model_config, engine.config)
            resizer = EpochResizer(self._leader, Coordinator(space, cores, engine.config.progress_timeout))
        try:
            await self._restore_size(resizer)
            self._operations.set_resizer(resizer)
            while True:
                self._served = resizer.data or self._served
                self._update_report(size=group_size(self._leader.view, self._layout, resizer.data))
                if exchanges_experts and resizer.dead is not None:
                    raise EngineDead(resizer.dead)
                await self._leader.changed(CHECK_SECONDS)
        finally:
            self._operations.set_resizer(None)
            self._leader.announce_size(0, 0)
            await cores.close()

    async def _restore_size(self, resizer: Resizer) -> None:
        """Tries again until it succeeds: nodes restart at different times, and the leader may still list cores that ended."""
        while resizer.data != self._served:
            try:
                await resizer.resize(SizeChange(self._served))
            except (EpochFailed, EngineDead) as error:
                log.warning("the group is not together yet", size=self._served, cause=str(error))
                self._update_report(last_error=str(error))
                await asyncio.sleep(RETRY_SECONDS)


def group_size(view: GroupView, layout: LayoutConfig, effective: int) -> GroupSize:
    """Counts data parallel ranks."""
    workers = layout.tensor * layout.pipeline
    cores = {core.rank for member in view.members for core in member.cores}
    return GroupSize(allocated=len(view.members) * layout.per_node // workers, joined=len(cores), effective=effective)
