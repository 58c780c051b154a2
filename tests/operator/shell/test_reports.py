"""Long polls of agents: real HTTP, no Kubernetes."""

import asyncio
import base64
import os
from collections.abc import AsyncIterator

import pytest
from starling_operator.logs import Key
from starling_operator.plan.observed import Pod
from starling_operator.reports import Reports

from tests.operator.shell.agents import Agent, AgentServer, serving
from tests.operator.shell.cluster import Manifest, until

KEY = ("space", "chat")


def secret(token: str) -> dict[tuple[str, str], Manifest]:
    return {("Secret", "chat-admin"): {"data": {"token": base64.b64encode(token.encode()).decode()}}}


def pod(address: str, phase: str = "Running") -> Pod:
    return Pod(name="chat-r-0-0", uid="u", group="chat-r-0", revision="r", number=0, address=address, phase=phase)


@pytest.fixture
async def server() -> AsyncIterator[AgentServer]:
    made = AgentServer(192 + os.getpid() % 60)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def agent() -> Agent:
    return Agent(serving("chat-r-0-0", "chat-r-0", "r", "chat", "hash"), "the token")


@pytest.fixture
def woken() -> list[Key]:
    return []


@pytest.fixture
async def reports(woken: list[Key]) -> AsyncIterator[Reports]:
    made = Reports(woken.append)
    yield made
    await made.close()


async def test_a_report_is_had_and_its_changes_wake(server: AgentServer, agent: Agent, reports: Reports, woken: list[Key]) -> None:
    reports.follow(KEY, [pod(await server.add(agent))], secret("the token"))
    await until(lambda: _has(reports, "serving"), "the first report")
    agent.say(phase="draining")
    await until(lambda: _has(reports, "draining"), "the changed report")
    assert woken == [KEY, KEY] and agent.asked <= 3, "a long poll, not a loop"


async def test_the_last_report_of_a_silent_agent_grows_old(
    server: AgentServer, agent: Agent, reports: Reports, woken: list[Key]
) -> None:
    address = await server.add(agent)
    reports.follow(KEY, [pod(address)], secret("the token"))
    await until(lambda: _has(reports, "serving"), "the first report")
    await server.close()
    count = len(woken)

    async def is_old() -> bool:
        heard = reports.of("u")
        return heard is not None and heard.report.phase == "serving" and heard.age > 0.4 and len(woken) > count

    await until(is_old, "the report to grow old, and somebody to be woken for it")


async def test_another_token_is_used_at_once(server: AgentServer, agent: Agent, reports: Reports) -> None:
    address = await server.add(agent)
    reports.follow(KEY, [pod(address)], secret("wrong"))
    await asyncio.sleep(0.2)
    assert reports.of("u") is None
    reports.follow(KEY, [pod(address)], secret("the token"))
    await until(lambda: _has(reports, "serving"), "the report")


async def test_only_running_pods_are_asked_and_gone_ones_are_forgotten(server: AgentServer, agent: Agent, reports: Reports) -> None:
    address = await server.add(agent)
    reports.follow(KEY, [pod(address, phase="Pending")], secret("the token"))
    reports.follow(KEY, [pod(address)], {})
    await asyncio.sleep(0.2)
    assert agent.asked == 0
    reports.follow(KEY, [pod(address)], secret("the token"))
    await until(lambda: _has(reports, "serving"), "the report")
    reports.forget(KEY)
    assert reports.of("u") is None


async def _has(reports: Reports, phase: str) -> bool:
    heard = reports.of("u")
    return heard is not None and heard.report.phase == phase
