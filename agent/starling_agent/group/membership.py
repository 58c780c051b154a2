"""This node's place in its group: it says what runs here, and hears who else is there."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Never

import structlog

from starling_agent.contract.group import GroupCore, GroupMember, GroupView
from starling_agent.group.membership_service import GroupRefusal, MembershipService, Unreachable

POLL_SECONDS = 5.0
"""How long a question waits for news; the next one follows at once, and is the sign of life that the leader looks for."""
RETRY_SECONDS = 1.0
log = structlog.get_logger("starling.group")


class GroupMembership:
    """`view` is the newest that the leader told; it stays while the leader is away.

    `tell` hears why this node is not in the group, and None when it is.
    """

    def __init__(self, desk: MembershipService, member: GroupMember, tell: Callable[[str | None], None]) -> None:
        self.view: GroupView | None = None
        self._desk = desk
        self._member = member
        self._tell = tell
        self._is_out = False
        self._own_news = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def node(self) -> int:
        return self._member.node

    def publish(self, cores: Sequence[GroupCore]) -> None:
        """The others hear of it at once."""
        self._member = self._member.model_copy(update={"cores": list(cores)})
        self._own_news.set()

    def drain(self) -> None:
        """This node goes. Its cores still take what other nodes send, for those accept requests for a while too."""
        self._member = self._member.model_copy(update={"draining": True})
        self._own_news.set()

    def stop_taking(self) -> None:
        """The cores that run here finish what they have, and get no more from other nodes."""
        self.publish([core.model_copy(update={"taking": False}) for core in self._member.cores])

    @property
    def is_draining(self) -> bool:
        return self._member.draining

    @property
    def is_taking(self) -> bool:
        """Whether the leader tells the others of a core here that takes requests."""
        members = self.view.members if self.view is not None else []
        return any(core.taking for member in members if member.node == self.node for core in member.cores)

    async def changed(self, seconds: float) -> None:
        """Waits for another view, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    async def run(self) -> Never:
        """Until it is cancelled."""
        while True:
            try:
                await self._ask()
            except GroupRefusal as refused:
                self._out(f"the leader refuses this node: {refused}")
                await asyncio.sleep(RETRY_SECONDS)
            except Unreachable as error:
                log.info("no leader", cause=str(error))
                if self.view is None:
                    self._out(str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def _out(self, cause: str) -> None:
        self._is_out = True
        self._tell(cause)

    async def _ask(self) -> None:
        """One question. News of our own end it early: the next one carries them."""
        self._own_news.clear()
        seconds = 0.0 if self.view is None else POLL_SECONDS
        question = asyncio.create_task(self._desk.ask(self._member, self.view, seconds))
        own_news = asyncio.create_task(self._own_news.wait())
        try:
            await asyncio.wait((question, own_news), return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                self._take(question.result())
        finally:
            for task in (question, own_news):
                task.cancel()
            await asyncio.gather(question, own_news, return_exceptions=True)

    def _take(self, view: GroupView) -> None:
        known, self.view = self.view, view
        if known != view:
            self._news.set()
        if self._is_out:
            self._is_out = False
            self._tell(None)
