"""This node's share of its group: which ranks run here, and what other nodes know of them."""

import asyncio
import contextlib
from collections.abc import Callable

from starling_engine import AsyncEngine
from starling_engine.delta import Stats
from starling_engine.topology.layout import NodePlacement

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.group import GroupCore, GroupView
from starling_agent.contract.identity import Identity
from starling_agent.group.membership import GroupMembership
from starling_agent.group.node_layout import NodeLayout, leader_sets_size
from starling_agent.group.workers import GroupWorkers

PUBLISH_SECONDS = 10.0
"""The longest wait until the leader's view shows that no core here takes requests, and until each core has sent new stats."""
PROPAGATION_SECONDS = 1.0
"""Time within which the leader's view reaches all other nodes."""
CHECK_SECONDS = 0.2


class LocalShare:
    """`ranks`: data parallel ranks whose cores run here. `workers`: workers here for cores of other nodes.

    `is_whole_group`: all of the group runs here, and the engine alone decides on its size.
    """

    def __init__(self, config: AgentConfig, identity: Identity, membership: GroupMembership) -> None:
        self._node_layout = node_layout = NodeLayout(config.layout.largest)
        self.ranks = node_layout.cores(identity.node)
        self.is_whole_group = node_layout.group.nodes == 1 and not leader_sets_size(config)
        self.membership = membership
        self.workers = GroupWorkers(node_layout, membership, identity.address)
        self.joining = ""
        """Address at which workers of other nodes join the core that runs here."""
        self._placement = NodePlacement(identity.address, self.ranks, config.layout.per_node)

    @property
    def placement(self) -> NodePlacement | None:
        return None if self.is_whole_group else self._placement

    def is_within(self, data: int) -> bool:
        """True if a group of `data` ranks includes this node. A node with only workers of other nodes' cores always is."""
        return not self.ranks or self.ranks[0] < data

    def is_losing_workers(self, view: GroupView) -> bool:
        """True while a node ends that some core needs for its workers. A request that begins now might not end."""
        return any(member.draining and self._node_layout.workers_for_others(member.node) for member in view.members)

    def publish_joining(self, address: str) -> None:
        """Publishes where other nodes' workers join the core that loads here. Only a node with one core has such workers."""
        self.joining = address
        self.membership.publish([GroupCore(rank=rank, taking=False, joining=address) for rank in self.ranks])

    def publish(self, engine: AsyncEngine) -> None:
        """Publishes the cores here: other nodes may send requests from now on."""
        if not self.is_whole_group:
            cores = zip(self.ranks, engine.cores.advertised_addresses, strict=True)
            self.membership.publish([GroupCore(rank=rank, address=address, joining=self.joining) for rank, address in cores])

    def withdraw(self) -> None:
        """Publishes that no core runs here any more."""
        self.joining = ""
        self.membership.publish(())

    async def finish_for_others(self, engine: AsyncEngine | None) -> None:
        """Waits until the cores here have no request of another node, and no core needs the workers here."""
        if self.is_whole_group:
            return
        self.membership.stop_accepting()
        await _wait_until(lambda: not self.membership.is_accepting, PUBLISH_SECONDS)
        await asyncio.sleep(PROPAGATION_SECONDS)
        before = _core_stats(engine)
        await _wait_until(
            lambda: all(now is not then for now, then in zip(_core_stats(engine), before, strict=False)), PUBLISH_SECONDS
        )
        while _has_requests(engine) or self.workers.alive:  # noqa: ASYNC110 - the counts come from other processes
            await asyncio.sleep(CHECK_SECONDS)


async def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for the condition, at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - other processes report it
                await asyncio.sleep(CHECK_SECONDS)


def _core_stats(engine: AsyncEngine | None) -> list[Stats]:
    """Returns the newest stats of each core here; every answer of a core makes a new object."""
    return [core.stats for core in engine.cores.node_clients] if engine is not None else []


def _has_requests(engine: AsyncEngine | None) -> bool:
    stats = engine.stats if engine is not None else Stats()
    return bool(stats.running or stats.waiting)
