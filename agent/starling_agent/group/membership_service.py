"""The membership service, as each node of a group reaches it."""

from typing import Protocol

from starling_agent.contract.group import GroupMember, GroupView


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
