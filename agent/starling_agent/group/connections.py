"""Keeps this node's frontend connected to the engine cores of all other nodes."""

import asyncio
from collections.abc import Callable
from typing import Never

import structlog
from starling_engine import AsyncEngine
from starling_engine.errors import EngineDead

from starling_agent.contract.group import GroupView
from starling_agent.group.local_share import LocalShare

LOOK_SECONDS = 0.5
"""A core may fail without the leader's having heard of it."""
log = structlog.get_logger("starling.group")


class Connections:
    """`changed` is called when a core came or went, with the cause where one was lost."""

    def __init__(
        self,
        engine: AsyncEngine,
        part: LocalShare,
        changed: Callable[[str | None], None],
        seen: Callable[[GroupView], None],
    ) -> None:
        """`seen` hears each view, again and again."""
        self._engine = engine
        self._part = part
        self._membership = part.membership
        self._changed = changed
        self._seen = seen
        self.complete = asyncio.Event()
        """Set once every core of a view is connected, at least one, and those here are among them."""

    async def follow(self) -> Never:
        while True:
            view = self._membership.view
            if view is not None:
                await self._settle(wanted_cores(view, self._membership.node), is_in=self._part.takes_part(view.data))
                self._seen(view)
            await self._membership.changed(LOOK_SECONDS)

    async def _settle(self, wanted: dict[str, str], *, is_in: bool) -> None:
        """Adds what is wanted, removes what is not, and adds anew what failed."""
        for name, failure in self._engine.cores.others.items():
            if failure is not None or name not in wanted:
                self._engine.cores.remove(name)
                self._changed(failure)
        missing = [name for name in wanted if name not in self._engine.cores.others]
        connected = all(await asyncio.gather(*(self._add(name, wanted[name]) for name in missing)))
        if connected and is_in and self._engine.cores.any_serving:
            self.complete.set()

    async def _add(self, name: str, address: str) -> bool:
        try:
            await self._engine.cores.add(name, address)
        except EngineDead as error:
            log.warning("a core is not there", core=name, cause=str(error))
            return False
        log.info("connected", core=name)
        self._changed(None)
        return True


def wanted_cores(view: GroupView, node: int) -> dict[str, str]:
    """Addresses by name of the cores that run on other nodes and take requests. A core that was started again has another name."""
    return {
        f"engine core {core.rank} of {member.pod} ({core.address})": core.address
        for member in view.members
        if member.node != node
        for core in member.cores
        if core.taking and core.address and core.rank < view.data
    }
