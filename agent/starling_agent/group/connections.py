"""Keeps this node's frontend connected to the engine cores of all other nodes."""

import asyncio
from collections.abc import Callable
from typing import Never

import structlog
from starling_engine import AsyncEngine
from starling_engine.errors import EngineDead

from starling_agent.contract.group import GroupView
from starling_agent.group.local_share import LocalShare

CHECK_SECONDS = 0.5
"""A core may fail before the leader's view shows it."""
log = structlog.get_logger("starling.group")


class CoreConnections:
    """Connects to cores as they come, and disconnects as they go."""

    def __init__(
        self,
        engine: AsyncEngine,
        local_share: LocalShare,
        on_change: Callable[[str | None], None],
        on_view: Callable[[GroupView], None],
    ) -> None:
        """`on_change` is called when a core came or went, with the cause if it was lost; `on_view` with each view, repeatedly."""
        self._engine = engine
        self._local_share = local_share
        self._membership = local_share.membership
        self._on_change = on_change
        self._on_view = on_view
        self.complete = asyncio.Event()
        """Set once every core of a view is connected, at least one, and this node's cores are among them."""

    async def run(self) -> Never:
        """Follows the leader's view until it is cancelled."""
        while True:
            view = self._membership.view
            if view is not None:
                await self._reconcile(remote_cores(view, self._membership.node), is_in=self._local_share.is_within(view.data))
                self._on_view(view)
            await self._membership.changed(CHECK_SECONDS)

    async def _reconcile(self, wanted: dict[str, str], *, is_in: bool) -> None:
        """Adds what is wanted, removes what is not, and adds again what failed."""
        for name, failure in self._engine.cores.remote.items():
            if failure is not None or name not in wanted:
                self._engine.cores.remove(name)
                self._on_change(failure)
        missing = [name for name in wanted if name not in self._engine.cores.remote]
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
        self._on_change(None)
        return True


def remote_cores(view: GroupView, node: int) -> dict[str, str]:
    """Returns addresses by name of the cores on other nodes that take requests. A core that restarted has another name."""
    return {
        f"engine core {core.rank} of {member.pod} ({core.address})": core.address
        for member in view.members
        if member.node != node
        for core in member.cores
        if core.taking and core.address and core.rank < view.data
    }
