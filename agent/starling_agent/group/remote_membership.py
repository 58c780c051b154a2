"""The leader's desk as a node far from it reaches it."""

from pathlib import Path

import httpx
from pydantic import ValidationError
from pydantic_core import from_json

from starling_agent.contract.group import GroupMember, GroupView
from starling_agent.group.membership_service import GroupRefusal, Unreachable
from starling_agent.http.received import post

GRACE_SECONDS = 5.0
CONNECT_SECONDS = 2.0


class RemoteMembershipService:
    """At `leader`, the host and port of its admin endpoint. Looks nobody else up: a name that is asked for too early is remembered
    as missing by the cluster's DNS for half a minute."""

    def __init__(self, leader: str, token_file: Path) -> None:
        self._url = f"http://{leader}/admin/group"
        self._token_file = token_file

    async def ask(self, member: GroupMember, known: GroupView | None, seconds: float) -> GroupView:
        query: dict[str, str | float] = {"wait": seconds}
        if known is not None:
            query |= {"after": known.version, "leader": known.incarnation}
        timeout = httpx.Timeout(seconds + GRACE_SECONDS, connect=CONNECT_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {self._token_file.read_text().strip()}", "Content-Type": "application/json"}
            # Proxies of the environment are for the world outside.
            async with httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False) as client:
                status, body = await post(client, self._url, params=query, headers=headers, content=member.model_dump_json())
        except (httpx.HTTPError, OSError) as error:
            raise Unreachable(f"the leader at {self._url} does not answer: {error or type(error).__name__}") from error
        if status != httpx.codes.OK:
            raise _refusal(status, body)
        try:
            return GroupView.model_validate_json(body)
        except ValidationError as error:
            raise Unreachable(f"the leader's answer cannot be read: {error}") from error


def _refusal(status: int, body: bytes) -> GroupRefusal:
    try:
        error = from_json(body)["error"]
        return GroupRefusal(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return GroupRefusal("unknown", f"the leader answered {status}: {body[:200].decode(errors='replace')}")
