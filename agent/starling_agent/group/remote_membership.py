"""The membership service of a leader on another node."""

from pathlib import Path

from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.group import GroupMember, GroupView
from starling_agent.group.membership_service import GroupRefusal, Unreachable

GRACE_SECONDS = 5.0
CONNECT_SECONDS = 2.0


class RemoteMembershipService:
    """Calls `leader`, the host and port of its admin endpoint, with a connection for each call.

    Only this name is resolved: a cluster's DNS remembers a name that is resolved too early as missing, for half a minute.
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
