"""This node's membership in its group: it reports what runs here, and learns which other nodes there are."""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Never

import structlog

from starling_agent.contract.config import AgentConfig
from starling_agent.contract.group import GroupCore, GroupMember, GroupView
from starling_agent.contract.identity import Identity
from starling_agent.contract.report import Report
from starling_agent.group.leader import GroupRefusal, MembershipService, Unreachable

POLL_SECONDS = 5.0
"""Seconds that the leader holds a poll open if nothing changes. The next one follows at once: polls show that this node lives."""
RETRY_SECONDS = 1.0
SHARED_FIELDS = {"namespace", "service", "revision", "engine", "layout"}
"""Parts of the configuration that all nodes have in common. Nodes that share a machine differ in paths and ports."""
log = structlog.get_logger("starling.group")


def make_member(config: AgentConfig, identity: Identity, report: Report) -> GroupMember:
    """Makes this node as a member of its group, without cores yet."""
    return GroupMember(
        node=identity.node,
        pod=identity.pod,
        address=identity.address,
        incarnation=report.incarnation,
        group=identity.group,
        revision=config.revision,
        release=report.agent,
        config_hash=hashlib.sha256(config.model_dump_json(include=SHARED_FIELDS).encode()).hexdigest(),
    )


class GroupMembership:
    """`view` is the leader's latest view of the group; it is kept while the leader is unreachable.

    `on_status` is called with the reason when this node is excluded from the group, and with None when it is back.
    """

    def __init__(self, service: MembershipService, member: GroupMember, on_status: Callable[[str | None], None]) -> None:
        self.view: GroupView | None = None
        self._service = service
        self._member = member
        self._on_status = on_status
        self._is_excluded = False
        self._member_changed = asyncio.Event()
        self._view_changed = asyncio.Event()

    @property
    def node(self) -> int:
        return self._member.node

    def publish(self, cores: Sequence[GroupCore]) -> None:
        """Reports these cores to the leader at once."""
        self._member = self._member.model_copy(update={"cores": list(cores)})
        self._member_changed.set()

    def drain(self) -> None:
        """Reports that this node is shutting down. Its cores still take requests from other nodes, which still accept new ones."""
        self._member = self._member.model_copy(update={"draining": True})
        self._member_changed.set()

    def stop_accepting(self) -> None:
        """Reports that this node's cores take no more requests from other nodes; they finish those that they have."""
        self.publish([core.model_copy(update={"taking": False}) for core in self._member.cores])

    @property
    def is_draining(self) -> bool:
        return self._member.draining

    @property
    def is_accepting(self) -> bool:
        """True while a core of this node takes requests, by the leader's view."""
        members = self.view.members if self.view is not None else []
        return any(core.taking for member in members if member.node == self.node for core in member.cores)

    async def changed(self, seconds: float) -> None:
        """Waits until `view` changes, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._view_changed.wait()
        self._view_changed.clear()

    async def run(self) -> Never:
        """Polls the leader until it is cancelled."""
        while True:
            try:
                await self._poll()
            except GroupRefusal as refused:
                self._exclude(f"the leader refuses this node: {refused}")
                await asyncio.sleep(RETRY_SECONDS)
            except Unreachable as error:
                log.info("leader unreachable", cause=str(error))
                if self.view is None:
                    self._exclude(str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def _exclude(self, cause: str) -> None:
        self._is_excluded = True
        self._on_status(cause)

    async def _poll(self) -> None:
        """Polls once. If this node changes meanwhile, the poll is cancelled, and the next one reports the change."""
        self._member_changed.clear()
        seconds = 0.0 if self.view is None else POLL_SECONDS
        poll = asyncio.create_task(self._service.poll(self._member, self.view, seconds))
        member_changed = asyncio.create_task(self._member_changed.wait())
        try:
            await asyncio.wait((poll, member_changed), return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                self._on_view(poll.result())
        finally:
            for task in (poll, member_changed):
                task.cancel()
            await asyncio.gather(poll, member_changed, return_exceptions=True)

    def _on_view(self, view: GroupView) -> None:
        known, self.view = self.view, view
        if known != view:
            self._view_changed.set()
        if self._is_excluded:
            self._is_excluded = False
            self._on_status(None)
