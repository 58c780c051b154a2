"""Fixtures of tests that poll agents: real HTTP, no Kubernetes."""

import os
from collections.abc import AsyncIterator

import pytest
from starling_agent.client.agent_client import AgentClient
from starling_operator.agents.polls import ANSWER_GRACE_SECONDS
from starling_operator.agents.reports import AgentReports
from starling_operator.logs import Key

from tests.operator.shell.agents import AgentServer


@pytest.fixture
async def server() -> AsyncIterator[AgentServer]:
    made = AgentServer(192 + os.getpid() % 60)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def reports(woken: list[Key]) -> AsyncIterator[AgentReports]:
    async with AgentClient(ANSWER_GRACE_SECONDS) as client:
        made = AgentReports(woken.append, client)
        yield made
        await made.close()
