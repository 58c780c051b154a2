"""Agents that answer /admin/report as real ones do, without an engine: a test sets what they report."""

import asyncio
import itertools
import secrets
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import web
from starling_agent.contract.config import ADMIN_PORT
from starling_agent.contract.report import Report, Topology


@dataclass
class Agent:
    """One agent. `update` changes its report and answers long polls at once. While `silent` it answers nobody."""

    report: Report
    token: str
    silent: bool = False
    polls: int = 0
    commit: str | None = None
    """The commit that the operator notified it of."""
    ends_in: float | None = None
    """Seconds until its end, as the operator notified it."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, **news: object) -> None:
        self.report = self.report.model_copy(update={**news, "version": self.report.version + 1})
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.polls += 1
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        self.commit = self.commit or request.query.get("commit")
        if "ends_in" in request.query:
            self.ends_in = float(request.query["ends_in"])
        if self.silent:
            await asyncio.sleep(3600)
        known = request.query.get("incarnation") == self.report.incarnation
        if known and int(request.query.get("after", "0")) >= self.report.version:
            await self._wait(float(request.query.get("wait", "0")))
        return web.Response(text=self.report.model_dump_json(), content_type="application/json")

    async def scale(self, request: web.Request) -> web.Response:  # noqa: ARG002 - only leaders are called
        return web.Response(status=404)

    async def _wait(self, seconds: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            return


def serving(pod: str, group: str, revision: str, service: str, config_hash: str) -> Report:
    """Returns the report of a healthy agent of one rank."""
    return Report(
        version=1,
        incarnation=secrets.token_hex(4),
        agent="0.1.0",
        config_hash=config_hash,
        service=service,
        revision=revision,
        group=group,
        node=int(pod.rpartition("-")[2]),
        pod=pod,
        phase="serving",
        ready=True,
        token_seen=True,
        service_token_seen=True,
        topology=Topology(tensor=1, pipeline=1, data=1, ranks=1),
        epoch=1,
    )


@dataclass
class EndlessAgent(Agent):
    """An agent whose answer never ends; it counts the bytes that were read. `most` protects the machine's memory."""

    sent: int = 0
    most: int = 64 * 1024 * 1024

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.polls += 1
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while self.sent < self.most:
                await response.write(b" " * 65536)
                self.sent += 65536
        return response


@dataclass
class InvalidAgent(Agent):
    """An agent whose report is overwritten with `fields`, valid or not."""

    fields: dict[str, object] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.Response:  # noqa: ARG002 - any request
        return web.json_response(self.report.model_dump(mode="json") | self.fields)


@dataclass
class EagerAgent(Agent):
    """An agent that always has news, and waits for none."""

    async def answer(self, request: web.Request) -> web.Response:  # noqa: ARG002 - any request
        self.polls += 1
        self.report = self.report.model_copy(update={"version": self.report.version + 1})
        return web.Response(text=self.report.model_dump_json(), content_type="application/json")


class AgentServer:
    """One process for all agents, each at an address of its own in 127.0.0.0/8; `block` keeps tests apart that run at once."""

    def __init__(self, block: int) -> None:
        self._addresses = (f"127.{block}.{high}.{low}" for high, low in itertools.product(range(256), range(1, 255)))
        self._agents: dict[str, Agent] = {}
        self._sites: dict[str, web.TCPSite] = {}
        app = web.Application()
        app.router.add_get("/admin/report", self._answer)
        app.router.add_route("*", "/admin/scale", self._scale)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()

    async def add(self, agent: Agent) -> str:
        """Returns its address."""
        address = next(self._addresses)
        self._agents[address] = agent
        self._sites[address] = web.TCPSite(self._runner, address, ADMIN_PORT)
        await self._sites[address].start()
        return address

    def replace(self, address: str, agent: Agent) -> None:
        """Lets another agent answer at the address."""
        self._agents[address] = agent

    async def remove(self, address: str) -> None:
        self._agents.pop(address, None)
        site = self._sites.pop(address, None)
        if site is not None:
            await site.stop()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        agent = self._agent_at(request)
        return web.Response(status=503) if agent is None else await agent.answer(request)

    async def _scale(self, request: web.Request) -> web.Response:
        agent = self._agent_at(request)
        return web.Response(status=503) if agent is None else await agent.scale(request)

    def _agent_at(self, request: web.Request) -> Agent | None:
        transport = request.transport
        assert transport is not None
        return self._agents.get(transport.get_extra_info("sockname")[0])
