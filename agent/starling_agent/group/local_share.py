"""This node's part of its group: which ranks run here, and what the others are told of them."""

import asyncio
import contextlib
from collections.abc import Callable

from starling_engine import AsyncEngine
from starling_engine.delta import Stats
from starling_engine.topology.node_placement import NodePlacement

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.group import GroupCore, GroupView
from starling_agent.contract.identity import Identity
from starling_agent.group.membership import GroupMembership
from starling_agent.group.node_layout import is_led, most_places
from starling_agent.group.workers import Workers

TOLD_SECONDS = 10.0
"""The longest wait for a leader to tell that this node takes no more requests, and for a core to say what it still has."""
HEARD_SECONDS = 1.0
"""Within which the other nodes have heard what the leader tells."""
LOOK_SECONDS = 0.2


class LocalShare:
    """`ranks`: data parallel ranks whose cores run here. `alone`: all of the group runs here, and its size is the engine's affair.

    `workers`: of cores that run on other nodes.
    """

    def __init__(self, config: AgentConfig, identity: Identity, membership: GroupMembership) -> None:
        self._places = places = most_places(config.layout)
        self.ranks = places.cores(identity.node)
        self.alone = places.nodes == 1 and not is_led(config)
        self.membership = membership
        self.workers = Workers(places, membership, identity.address)
        self.joining = ""
        """Where workers of other nodes have to join the core that runs here."""
        self._here = NodePlacement(identity.address, self.ranks, config.layout.per_node)

    @property
    def here(self) -> NodePlacement | None:
        return None if self.alone else self._here

    def takes_part(self, data: int) -> bool:
        """Whether it is one of a group of that size. A node with only workers of other nodes' cores always is."""
        return not self.ranks or self.ranks[0] < data

    def is_losing_workers(self, view: GroupView) -> bool:
        """A node goes without which some core cannot run, so that what begins now might not end."""
        return any(member.draining and self._places.workers_for_others(member.node) for member in view.members)

    def invite(self, joining: str) -> None:
        """Workers of the core that loads here are to join it: who has some on other nodes is the only core of its own."""
        self.joining = joining
        self.membership.publish([GroupCore(rank=rank, taking=False, joining=joining) for rank in self.ranks])

    def publish(self, engine: AsyncEngine) -> None:
        """The other nodes may send requests from now on."""
        if not self.alone:
            cores = zip(self.ranks, engine.cores.reachable, strict=True)
            self.membership.publish([GroupCore(rank=rank, address=address, joining=self.joining) for rank, address in cores])

    def withdraw(self) -> None:
        """No core runs here any more."""
        self.joining = ""
        self.membership.publish(())

    async def finish_for_others(self, engine: AsyncEngine | None) -> None:
        """Until the cores that run here have no request of another node's frontend left, and no core needs the workers here."""
        if self.alone:
            return
        self.membership.stop_taking()
        await _at_most(TOLD_SECONDS, lambda: not self.membership.is_taking)
        await asyncio.sleep(HEARD_SECONDS)
        said = _said(engine)
        await _at_most(TOLD_SECONDS, lambda: all(now is not then for now, then in zip(_said(engine), said, strict=False)))
        while _has_requests(engine) or self.workers.alive:  # noqa: ASYNC110 - the counts come from other processes
            await asyncio.sleep(LOOK_SECONDS)


async def _at_most(seconds: float, is_true: Callable[[], bool]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not is_true():  # noqa: ASYNC110 - told by other processes
                await asyncio.sleep(LOOK_SECONDS)


def _said(engine: AsyncEngine | None) -> list[Stats]:
    """The last of each core here; it is another object with every answer."""
    return [core.stats for core in engine.cores.here] if engine is not None else []


def _has_requests(engine: AsyncEngine | None) -> bool:
    stats = engine.stats if engine is not None else Stats()
    return bool(stats.running or stats.waiting)
