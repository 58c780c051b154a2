"""The leader's side: it keeps the list of nodes, and tells it to each of them."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Never

import structlog

from starling_agent.contract.group import GroupMember, GroupView
from starling_agent.group.membership_service import GroupRefusal

MAX_WAIT_SECONDS = 30.0
SILENCE_SECONDS = 15.0
"""A node that has not asked for so long is gone. Nodes ask at least every POLL_SECONDS; see `member`."""
LOOK_SECONDS = 1.0
log = structlog.get_logger("starling.group")


class Leader:
    """`own` is node 0's: others must agree with it. All on one event loop. A Desk."""

    def __init__(self, own: GroupMember, nodes: int, data: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`nodes`: that the group may have at most. `data`: as in GroupView, 0 where a size is yet to be reached."""
        self._own = own
        self._nodes = nodes
        self._clock = clock
        self._heard: dict[int, float] = {}
        self._view = GroupView(incarnation=own.incarnation, version=1, data=data, target=data)
        self._changed = asyncio.Event()

    @property
    def view(self) -> GroupView:
        return self._view

    async def ask(self, member: GroupMember, known: GroupView | None, seconds: float) -> GroupView:
        after = known.version if known is not None and known.incarnation == self._view.incarnation else 0
        return await self.answer(member, after, seconds)

    async def answer(self, member: GroupMember, after: int, seconds: float) -> GroupView:
        """Takes in what the node says of itself, then waits for a version above `after`. Raises GroupRefusal."""
        self._check(member)
        self._take(member)
        try:
            async with asyncio.timeout(min(max(seconds, 0.0), MAX_WAIT_SECONDS)):
                while self._view.version <= after:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._view

    def resize(self, data: int, target: int) -> None:
        """Tells which cores take requests, and which will."""
        if (data, target) != (self._view.data, self._view.target):
            self._view = self._view.model_copy(update={"data": data, "target": target})
            self._tell(list(self._view.members))

    async def changed(self, seconds: float) -> None:
        """Waits for another view, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def watch(self) -> Never:
        """Drops nodes that fell silent, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.drop_silent()

    def drop_silent(self) -> None:
        now = self._clock()
        silent = {node for node, heard in self._heard.items() if now - heard > SILENCE_SECONDS}
        for node in silent:
            log.warning("a node is gone: it has not asked for its group", node=node, seconds=SILENCE_SECONDS)
            del self._heard[node]
        if silent:
            self._tell([member for member in self._view.members if member.node not in silent])

    def _check(self, member: GroupMember) -> None:
        own = self._own
        for code, name in (("other_group", "group"), ("other_revision", "revision"), ("other_release", "release")):
            asked, have = getattr(member, name), getattr(own, name)
            if asked != have:
                raise GroupRefusal(code, f"{member.pod} is of {name} {asked}, but its leader {own.pod} is of {have}")
        if member.config_hash != own.config_hash:
            raise GroupRefusal("other_configuration", f"{member.pod} and its leader {own.pod} have different configurations")
        if not 0 <= member.node < self._nodes:
            raise GroupRefusal("no_such_node", f"{member.pod} is node {member.node}, but its group has {self._nodes} nodes")

    def _take(self, member: GroupMember) -> None:
        self._heard[member.node] = self._clock()
        before = next((known for known in self._view.members if known.node == member.node), None)
        if member == before:
            return
        if before is None or before.incarnation != member.incarnation:
            log.info("a node joined", node=member.node, pod=member.pod, address=member.address)
        self._tell([known for known in self._view.members if known.node != member.node] + [member])

    def _tell(self, members: list[GroupMember]) -> None:
        members.sort(key=lambda member: member.node)
        self._view = self._view.model_copy(update={"version": self._view.version + 1, "members": members})
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def close(self) -> None:
        """Whoever waits is answered."""
        self._tell(list(self._view.members))
