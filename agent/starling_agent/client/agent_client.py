"""HTTP client of agents' admin endpoints, and of routers. Answers are bounded; no redirection or proxy is followed."""

import asyncio
from typing import Self

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from pydantic_core import from_json

from starling_agent.client.bounded import MOST_BYTES, UNCOMPRESSED, BadAnswer, parse, parse_report, read_all
from starling_agent.contract.group import GroupMember, GroupView
from starling_agent.contract.report import Report
from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.contract.router_report import RouterReport, ServiceNotice
from starling_agent.contract.scale import ScaleRequest

MOST_VIEW_BYTES = 1 << 20
"""Twice the view of a group of a thousand nodes."""


class NoAnswer(Exception):
    """The agent could not be reached, or did not answer in time; the message is the cause."""


class AgentRefusal(Exception):
    """The agent answered with an HTTP error: `code` and `message` of OpenAI's error body, `http_STATUS` where it has none."""

    def __init__(self, status: int, body: bytes) -> None:
        text = body.decode(errors="replace")
        try:
            error = from_json(text)["error"]
            self.code, self.message = str(error.get("code") or f"http_{status}"), str(error["message"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self.code, self.message = f"http_{status}", f"its leader answers {status}: {text.strip()[:200]}"
        self.status = status
        super().__init__(f"{status} {self.code}: {self.message}")


class AgentClient:
    """Calls agents over one pool of connections without a limit: a long poll holds one for each pod, nearly always.

    `address` is HOST:PORT, `token` that of the admin endpoint; a call may take `seconds`. All calls raise NoAnswer, AgentRefusal,
    and BadAnswer for an answer of the wrong form.
    """

    def __init__(self, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._session: ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def report(
        self,
        address: str,
        token: str,
        *,
        known: Report | None = None,
        wait: float = 0.0,
        commit: str | None = None,
        ends_in: float | None = None,
        routed: bool | None = None,
        sleep: int | None = None,
        seconds: float,
    ) -> Report:
        """Returns the agent's report when it is another than `known`, or after `wait` seconds. See `contract.report`."""
        query = _poll(known, wait)
        if commit is not None:
            query["commit"] = commit
        if ends_in is not None:
            query["ends_in"] = f"{ends_in:.1f}"
        if routed is not None:
            query["routed"] = "yes" if routed else "no"
        if sleep is not None:
            query["sleep"] = str(sleep)
        return parse_report(await self._call("GET", address, "report", token, query, seconds=seconds))

    async def raw_report(self, address: str, token: str, *, seconds: float) -> str:
        """Returns the report's JSON with all its parts."""
        return (await self._call("GET", address, "report", token, {}, seconds=seconds)).decode(errors="replace")

    async def scale(self, address: str, token: str, request: ScaleRequest, *, seconds: float) -> None:
        """Starts an operation at the group's leader. Sent again it is the same operation. See `contract.scale`."""
        await self._call("PUT", address, "scale", token, {}, body=request.model_dump_json(), seconds=seconds)

    async def cancel(self, address: str, token: str, operation: str, *, seconds: float) -> None:
        """Cancels an operation before its commit."""
        await self._call("DELETE", address, "scale", token, {"operation": operation}, seconds=seconds)

    async def group(
        self, address: str, token: str, member: GroupMember, *, known: GroupView | None = None, wait: float = 0.0, seconds: float
    ) -> GroupView:
        """Reports a member to the leader. Returns a view that is not `known`, or the same after `wait` seconds."""
        query = _poll(known, wait, "leader")
        body = member.model_dump_json()
        answer = await self._call("POST", address, "group", token, query, body=body, most=MOST_VIEW_BYTES, seconds=seconds)
        return parse(GroupView, answer, "view of the group")

    async def router_report(
        self, address: str, token: str, notice: ServiceNotice, *, known: RouterReport | None = None, wait: float, seconds: float
    ) -> RouterReport:
        """Gives a router the notice, with the routers' token. Returns its report as `report` does an agent's."""
        query = _poll(known, wait)
        url, body = f"http://{address}/router/report", notice.model_dump_json()
        answer = await self._send("POST", url, {ROUTER_TOKEN: token}, query, body=body, seconds=seconds)
        return parse(RouterReport, answer, "report")

    async def _call(
        self,
        method: str,
        address: str,
        path: str,
        token: str,
        query: dict[str, str],
        *,
        body: str | None = None,
        most: int = MOST_BYTES,
        seconds: float,
    ) -> bytes:
        url, headers = f"http://{address}/admin/{path}", {"Authorization": f"Bearer {token}"}
        return await self._send(method, url, headers, query, body=body, most=most, seconds=seconds)

    async def _send(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        query: dict[str, str],
        *,
        body: str | None = None,
        most: int = MOST_BYTES,
        seconds: float,
    ) -> bytes:
        headers = headers | UNCOMPRESSED
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            # aiohttp's own limit of a whole request swallows a cancellation that comes as it expires, and a poll would never end.
            # A redirection could lead to an address that the caller reaches and the pod does not.
            async with (
                asyncio.timeout(seconds),
                self._http().request(method, url, params=query, headers=headers, data=body, allow_redirects=False) as response,
            ):
                answer, status = await read_all(response.content.iter_any(), most), response.status
        except BadAnswer:
            raise
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoAnswer(str(error) or type(error).__name__) from error
        if status >= 400:
            raise AgentRefusal(status, answer)
        return answer

    def _http(self) -> ClientSession:
        """Returns the session. Its first use is inside the event loop; the constructor may run outside."""
        if self._session is None:
            self._session = ClientSession(
                connector=TCPConnector(limit=0),
                cookie_jar=DummyCookieJar(),
                timeout=ClientTimeout(total=None, connect=self._connect_seconds),
                trust_env=False,
                auto_decompress=False,
            )
        return self._session


def _poll(known: Report | GroupView | RouterReport | None, wait: float, incarnation: str = "incarnation") -> dict[str, str]:
    """Returns the query of a long poll. `incarnation` is the parameter that names the one of `known`."""
    query = {"wait": f"{wait:g}"}
    return query if known is None else query | {"after": str(known.version), incarnation: known.incarnation}
