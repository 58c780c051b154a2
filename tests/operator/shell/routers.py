"""A router that reports to the operator what a test sets."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.router_report import CanaryNotice, CanaryReport, RouterReport, ServiceNotice

from tests.operator.shell.kubelet import Kubelet

ADDRESS = f"127.{192 + os.getpid() % 60}.9.8"


class ReportingRouter:
    """Answers the operator's polls as a router does: at once with news.

    differing   what it has seen of any canary
    quiet       seconds since the last request; None: there is one
    phases      of the service, as it was told one after the other
    """

    def __init__(self) -> None:
        self.weights: list[int | None] = []
        self.phases: list[str] = []
        self.differing = 0
        self.quiet: float | None = 9.0
        self._versions = itertools.count(1)

    async def answer(self, request: web.Request) -> web.Response:
        notice = ServiceNotice.model_validate_json(await request.read())
        canary = notice.canary
        self.phases += [] if self.phases[-1:] == [notice.phase] else [notice.phase]
        weight = None if canary is None else canary.weight
        self.weights += [] if self.weights[-1:] == [weight] else [weight]
        report = None if canary is None else self._report(canary)
        held = 1 if self.quiet is None else 0
        answer = RouterReport(
            version=next(self._versions), incarnation="i", open=held, held=held, quiet_seconds=self.quiet, canary=report
        )
        await asyncio.sleep(0.2)
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    def _report(self, canary: CanaryNotice) -> CanaryReport:
        return CanaryReport(canary=canary.canary, attempt=canary.attempt, compared=9, differing=self.differing)


@pytest.fixture
async def router(kubelet: Kubelet) -> AsyncIterator[ReportingRouter]:
    kubelet.router_address = ADDRESS
    made, app = ReportingRouter(), web.Application()
    app.router.add_post("/router/report", made.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, ENDPOINT_PORT).start()
    yield made
    await runner.cleanup()
