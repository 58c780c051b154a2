"""The operator's polls of routers, and a real router that answers them: no Kubernetes."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starling_agent.client.agent_client import AgentClient
from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.router import router_token
from starling_agent.contract.router_report import CanaryNotice, ServiceNotice
from starling_agent.file_token import FileToken
from starling_agent.server.http_server import HttpServer
from starling_agent.settings import ServerSettings
from starling_operator.agents import polls, routers
from starling_operator.agents.polls import ANSWER_GRACE_SECONDS, FIRST_PAUSE
from starling_operator.agents.routers import NOTICE_SECONDS, RouterReports
from starling_operator.logs import Key
from starling_operator.plan.observed import Observed, RouterPod
from starling_router import demand
from starling_router.hold_queue import HoldPolicy
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter

from tests.operator.plan.building import TOKEN, make_observed
from tests.waiting import until

KEY = ("space", "chat")
BODY = {"model": "chat", "messages": []}
ADDRESS = f"127.{192 + os.getpid() % 60}.9.9"
"""A router has one port, which a pod has for itself; no other test's agents are at this address."""


def seen(**fields: object) -> Observed:
    given = {"name": "chat-router-a", "uid": "a", "address": ADDRESS, "is_running": True}
    return make_observed(routers=(RouterPod(**(given | fields)),))  # type: ignore[arg-type]


@pytest.fixture
async def router(tmp_path: Path) -> ServiceRouter:
    """One without servers, which has the token that the operator derives."""
    (tmp_path / "token").write_bytes(router_token(TOKEN.encode()))
    settings = ServerSettings(access_log=False, router_token=FileToken(tmp_path / "token"))
    return ServiceRouter(settings, RouterPolicy(), hold=HoldPolicy(seconds=2.0))


@pytest.fixture
async def client(router: ServiceRouter) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(router.app)
    with socket.create_server((ADDRESS, ENDPOINT_PORT)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=f"http://{ADDRESS}:{ENDPOINT_PORT}", timeout=60) as made:
            yield made
        server.should_exit = True
        await router.close()
        await task


@pytest.fixture
async def reports(woken: list[Key]) -> AsyncIterator[RouterReports]:
    async with AgentClient(ANSWER_GRACE_SECONDS) as client:
        made = RouterReports(woken.append, client)
        yield made
        await made.close()


async def until_tried(reports: RouterReports) -> None:
    async def is_tried() -> bool:
        return reports.has_tried(KEY)

    await until(is_tried, "the first poll")


async def until_told(reports: RouterReports, notice: ServiceNotice) -> None:
    async def is_told() -> bool:
        return reports.notify(KEY, seen(), notice) is None

    await until(is_told, "the notice to be given")


async def test_a_request_wakes_and_its_client_hears_the_notice(
    client: httpx.AsyncClient, reports: RouterReports, woken: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(routers, "NOTICE_SECONDS", 0.05)  # far less than a request is held

    async def is_quiet() -> bool:
        reply = reports.reply("a")
        return reply is not None and reply.report is not None and reply.report.quiet_seconds is not None

    async def is_busy() -> bool:
        return not await is_quiet()

    reports.follow(KEY, seen())
    await until(is_quiet, "the first report")
    count = len(woken)
    reports.notify(KEY, seen(), ServiceNotice(phase="Idle", message="no request for 60 s"))
    request = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
    await until(is_busy, "the request to be news")
    assert len(woken) == count + 1
    await until_told(reports, ServiceNotice(phase="Progressing", message="0 of 1 groups serve", eta_seconds=7))
    answer = await request
    assert answer.status_code == 503 and "Progressing: 0 of 1 groups serve; try again in about 7 s" in answer.text
    await until(is_quiet, "the router to be quiet again")
    assert len(woken) == count + 2


async def test_only_routers_that_run_are_polled_and_those_that_went_are_forgotten(
    client: httpx.AsyncClient, reports: RouterReports, woken: list[Key]
) -> None:
    reports.follow(KEY, seen(is_running=False))
    assert reports.has_tried(KEY)
    assert reports.reply("a") is None and (await client.get("/health")).status_code == 200
    reports.follow(KEY, seen())
    await until_tried(reports)
    reply = reports.reply("a")
    assert reply is not None and reply.report is not None and woken == [KEY]
    reports.follow(KEY, seen(uid="b", is_running=False))
    assert reports.reply("a") is None


async def test_a_router_that_does_not_answer_wakes_once(reports: RouterReports, woken: list[Key]) -> None:
    reports.follow(KEY, seen())
    await until_tried(reports)
    await asyncio.sleep(2 * FIRST_PAUSE)
    assert reports.reply("a") is None and woken == [KEY]


async def test_many_notices_are_few_polls_and_the_last_one_is_told(client: httpx.AsyncClient, reports: RouterReports) -> None:
    reports.follow(KEY, seen())
    await until_tried(reports)
    began = time.monotonic()
    told = [reports.notify(KEY, seen(), ServiceNotice(phase="Progressing", eta_seconds=left)) for left in range(50, 0, -1)]
    assert 1 <= told.count(None) <= 1 + (time.monotonic() - began) / NOTICE_SECONDS
    assert all(0 < left <= NOTICE_SECONDS for left in told if left is not None)
    await until_told(reports, ServiceNotice(phase="Progressing", eta_seconds=1))

    async def is_heard() -> bool:
        return "try again in about 1 s" in (await client.get("/ready")).text

    await until(is_heard, "the last notice")


async def test_a_router_that_ends_is_not_polled_without_a_pause(
    client: httpx.AsyncClient, router: ServiceRouter, reports: RouterReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polls, "NO_NEWS_SECONDS", 4 * polls.MIN_POLL_SECONDS)
    answered = ("/router/report", 200)
    reports.follow(KEY, seen())
    await until_tried(reports)
    router.end_holding()  # as at its end: it answers all polls at once
    assert (await client.get("/health")).status_code == 200

    async def are_three_more() -> bool:
        return router.responses[answered] >= before + 3

    before, began = router.responses[answered], time.monotonic()
    await until(are_three_more, "three polls")
    assert time.monotonic() - began > 1.5 * polls.NO_NEWS_SECONDS


async def test_shares_of_a_canary_are_told_at_once(reports: RouterReports) -> None:
    """Its first pod may be ready within the second in which all else waits."""
    reports.follow(KEY, seen())
    await until_tried(reports)
    for weight in (0, 10):
        share = CanaryNotice(stable="a", canary="b", weight=weight, sticky_by="key", compare="slo", exact=False)
        assert reports.notify(KEY, seen(), ServiceNotice(canary=share)) is None
        await until_told(reports, ServiceNotice(canary=share))
