"""Agents that answer /admin/report as real ones do, without an engine: a test sets what they report. And routers nobody asks."""

import asyncio
import itertools
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry
from starling_agent.contract.config import ADMIN_PORT, ENDPOINT_PORT
from starling_agent.contract.report import Report, Topology
from starling_router.canary import CanaryTraffic
from starling_router.demand import Demand


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
    sleep: int | None = None
    """Level at which it is to sleep, as the operator notified it."""
    wait: float = 0.0
    """Seconds for which the last poll waits for news."""
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
        self.wait = float(request.query.get("wait", "0"))
        self.sleep = int(request.query["sleep"]) if "sleep" in request.query else None
        if self.silent:
            await asyncio.sleep(3600)
        known = request.query.get("incarnation") == self.report.incarnation
        if known and int(request.query.get("after", "0")) >= self.report.version:
            await self._wait(self.wait)
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
    """One process for all pods, each at an address of its own in 127.0.0.0/8; `block` keeps tests apart that run at once."""

    def __init__(self, block: int) -> None:
        self._addresses = (f"127.{block}.{high}.{low}" for high, low in itertools.product(range(256), range(1, 255)))
        self._agents: dict[str, Agent] = {}
        self._demands: dict[str, Demand] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._sites: dict[str, web.SockSite] = {}
        app = web.Application()
        app.router.add_get("/admin/report", self._answer)
        app.router.add_route("*", "/admin/scale", self._scale)
        app.router.add_post("/router/report", self._demand)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()

    async def add(self, agent: Agent) -> str:
        """Returns its address."""
        address = next(self._addresses)
        self._agents[address] = agent
        await self._listen(address, ADMIN_PORT)
        return address

    async def add_router(self) -> str:
        """Returns the address of a router that answers the operator as a real one that nobody asks for anything."""
        address = next(self._addresses)
        self._demands[address] = Demand(lambda: 0, CanaryTraffic(CollectorRegistry()))
        await self._listen(address, ENDPOINT_PORT)
        return address

    def replace(self, address: str, agent: Agent) -> None:
        """Lets another agent answer at the address."""
        self._agents[address] = agent

    async def remove(self, address: str) -> None:
        self._agents.pop(address, None)
        self._demands.pop(address, None)
        site = self._sites.pop(address, None)
        if site is not None:
            await self._end_accepting(self._sockets.pop(address))
            await site.stop()

    async def restore(self, address: str, agent: Agent) -> None:
        """Lets an agent answer at an address that was removed."""
        self._agents[address] = agent
        await self._listen(address, ADMIN_PORT)

    async def close(self) -> None:
        await self._end_accepting(*self._sockets.values())
        await self._runner.cleanup()

    async def _listen(self, address: str, port: int) -> None:
        self._sockets[address] = socket.create_server((address, port))
        self._sites[address] = web.SockSite(self._runner, self._sockets[address])
        await self._sites[address].start()

    async def _end_accepting(self, *listening: socket.socket) -> None:
        """Lets connections that were accepted in this turn begin: Python 3.11 leaks one whose server is closed before."""
        for each in filter(_is_open, listening):
            asyncio.get_running_loop().remove_reader(each.fileno())
        await asyncio.sleep(0)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        agent = self._agent_at(request)
        return web.Response(status=503) if agent is None else await agent.answer(request)

    async def _scale(self, request: web.Request) -> web.Response:
        agent = self._agent_at(request)
        return web.Response(status=503) if agent is None else await agent.scale(request)

    async def _demand(self, request: web.Request) -> web.StreamResponse:
        demand, asked = self._demands.get(_address(request)), request.query
        if demand is None:
            return web.Response(status=503)
        report = await demand.wait(int(asked.get("after", "0")), asked.get("incarnation", ""), float(asked.get("wait", "0")))
        return web.Response(text=report.model_dump_json(), content_type="application/json")

    def _agent_at(self, request: web.Request) -> Agent | None:
        return self._agents.get(_address(request))


def _address(request: web.Request) -> str:
    """Of the pod that is asked."""
    transport = request.transport
    assert transport is not None
    return str(transport.get_extra_info("sockname")[0])


def _is_open(listening: socket.socket) -> bool:
    return listening.fileno() >= 0
