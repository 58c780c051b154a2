"""The leader's list of nodes, and how nodes reach it: each reports itself, and gets the list."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Never, Protocol

import structlog
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.group import GroupMember, GroupView
from starling_agent.http.errors import ApiError

MAX_WAIT_SECONDS = 30.0
SILENCE_SECONDS = 15.0
"""A node that has not polled for this long is gone. Nodes poll at least every POLL_SECONDS; see `membership`."""
CHECK_SECONDS = 1.0
GRACE_SECONDS = 5.0
CONNECT_SECONDS = 2.0
log = structlog.get_logger("starling.group")


class GroupRefusal(Exception):
    """This node cannot be in that group. `code` is one of those of `contract.group`, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unreachable(Exception):
    """The leader is not there, or not yet; another try may find it."""


class MembershipService(Protocol):
    """The leader's list of nodes, in this process or on another node."""

    async def poll(self, member: GroupMember, known: GroupView | None, seconds: float) -> GroupView:
        """Reports `member`, and returns a view that is not `known`, or the same one after `seconds`.

        Raises GroupRefusal or Unreachable.
        """
        ...


class Leader:
    """The MembershipService in the leader's own process, on one event loop. All nodes must agree with `local`, which is node 0."""

    def __init__(self, local: GroupMember, nodes: int, data: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`nodes` is the most that the group may have. `data` is as in GroupView: 0 where the size is set later."""
        self._local = local
        self._nodes = nodes
        self._clock = clock
        self._last_poll: dict[int, float] = {}
        self._view = GroupView(incarnation=local.incarnation, version=1, data=data, target=data)
        self._changed = asyncio.Event()

    @property
    def view(self) -> GroupView:
        return self._view

    async def poll(self, member: GroupMember, known: GroupView | None, seconds: float) -> GroupView:
        after = known.version if known is not None and known.incarnation == self._view.incarnation else 0
        return await self.answer(member, after, seconds)

    async def answer(self, member: GroupMember, after: int, seconds: float) -> GroupView:
        """Takes the node into the list, then waits for a version above `after`. Raises GroupRefusal."""
        self._check(member)
        self._register(member)
        try:
            async with asyncio.timeout(min(max(seconds, 0.0), MAX_WAIT_SECONDS)):
                while self._view.version <= after:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._view

    def announce_size(self, data: int, target: int) -> None:
        """Tells all nodes which cores take requests now, and which will."""
        if (data, target) != (self._view.data, self._view.target):
            self._view = self._view.model_copy(update={"data": data, "target": target})
            self._publish(list(self._view.members))

    async def changed(self, seconds: float) -> None:
        """Waits for another view, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def watch(self) -> Never:
        """Drops silent nodes until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.drop_silent()

    def drop_silent(self) -> None:
        now = self._clock()
        silent = {node for node, polled in self._last_poll.items() if now - polled > SILENCE_SECONDS}
        for node in silent:
            log.warning("a node is gone: it has not asked for its group", node=node, seconds=SILENCE_SECONDS)
            del self._last_poll[node]
        if silent:
            self._publish([member for member in self._view.members if member.node not in silent])

    def _check(self, member: GroupMember) -> None:
        local = self._local
        for code, name in (("other_group", "group"), ("other_revision", "revision"), ("other_release", "release")):
            given, expected = getattr(member, name), getattr(local, name)
            if given != expected:
                raise GroupRefusal(code, f"{member.pod} is of {name} {given}, but its leader {local.pod} is of {expected}")
        if member.config_hash != local.config_hash:
            raise GroupRefusal("other_configuration", f"{member.pod} and its leader {local.pod} have different configurations")
        if not 0 <= member.node < self._nodes:
            raise GroupRefusal("no_such_node", f"{member.pod} is node {member.node}, but its group has {self._nodes} nodes")

    def _register(self, member: GroupMember) -> None:
        self._last_poll[member.node] = self._clock()
        before = next((known for known in self._view.members if known.node == member.node), None)
        if member == before:
            return
        if before is None or before.incarnation != member.incarnation:
            log.info("a node joined", node=member.node, pod=member.pod, address=member.address)
        self._publish([known for known in self._view.members if known.node != member.node] + [member])

    def _publish(self, members: list[GroupMember]) -> None:
        members.sort(key=lambda member: member.node)
        self._view = self._view.model_copy(update={"version": self._view.version + 1, "members": members})
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def close(self) -> None:
        """Answers all polls that wait."""
        self._publish(list(self._view.members))


# ---- from node to node: `/admin/group`, as `contract.group` describes it ----


class RemoteMembershipService:
    """The MembershipService of a leader on another node. Calls `leader`, the host and port of its admin endpoint.

    Each call has a connection of its own. Only this name is resolved: a cluster's DNS remembers a name that is resolved too early
    as missing, for half a minute.
    """

    def __init__(self, leader: str, token_file: Path) -> None:
        self._leader = leader
        self._token_file = token_file

    async def poll(self, member: GroupMember, known: GroupView | None, seconds: float) -> GroupView:
        try:
            token = self._token_file.read_text().strip()
            async with AgentClient(CONNECT_SECONDS) as client:
                return await client.group(self._leader, token, member, known=known, wait=seconds, seconds=seconds + GRACE_SECONDS)
        except AgentRefusal as refusal:
            raise GroupRefusal(refusal.code, refusal.message) from refusal
        except (NoAnswer, BadAnswer, OSError) as error:
            raise Unreachable(f"the leader at http://{self._leader}/admin/group does not answer: {error}") from error


async def answer_group(request: Request, leader: Leader | None, leader_address: str, after: int, seconds: float) -> Response:
    """Answers a node's poll. `leader` is None on other nodes. Raises ApiError."""
    if leader is None:
        raise not_leader(leader_address)
    try:
        member = GroupMember.model_validate_json(await request.body())
    except ValidationError as error:
        raise ApiError(400, f"no node describes itself so: {error}", code="invalid_value") from None
    if request.query_params.get("leader") != leader.view.incarnation:
        after = 0
    try:
        view = await leader.answer(member, after, seconds)
    except GroupRefusal as refused:
        raise ApiError(400 if refused.code == "no_such_node" else 409, str(refused), code=refused.code) from None
    return Response(view.model_dump_json(), media_type="application/json")


def not_leader(leader_address: str) -> ApiError:
    """Makes the answer of a node that does not lead its group."""
    return ApiError(409, f"this node does not lead its group; ask {leader_address}", code="not_leader")
