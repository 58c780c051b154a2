"""A decision waits for pods that were never polled: real HTTP, no Kubernetes."""

import asyncio

import pytest
from starling_operator.agents import first_answers
from starling_operator.agents.first_answers import NEW_POD_SECONDS, START_SECONDS, FirstAnswers
from starling_operator.agents.reports import AgentReports
from starling_operator.logs import Key
from starling_operator.plan.observed import Observed, Pod

from tests.operator.plan.building import make_observed
from tests.operator.shell.agents import Agent, AgentServer, serving
from tests.operator.shell.polled import reports as reports
from tests.operator.shell.polled import server as server
from tests.waiting import until

KEY = ("space", "chat")


def seen(*addresses: str) -> Observed:
    group = {"group": "chat-r-0", "revision": "r", "owner": "set", "phase": "Running"}
    pods = (
        Pod(name=f"chat-r-0-{number}", uid=address, number=number, address=address, **group)  # type: ignore[arg-type]
        for number, address in enumerate(addresses)
    )
    return make_observed(children={("StatefulSet", "chat-r-0"): {"metadata": {"uid": "set"}}}, pods=tuple(pods), token="the token")


def agent(number: int, *, silent: bool = False) -> Agent:
    return Agent(serving(f"chat-r-0-{number}", "chat-r-0", "r", "chat", "hash"), "the token", silent=silent)


async def test_the_first_decision_waits_until_all_pods_were_polled(
    server: AgentServer, reports: AgentReports, woken: list[Key]
) -> None:
    answers = FirstAnswers((reports,))
    assert answers.seconds_left(("space", "without pods")) == 0
    slow = agent(1, silent=True)
    addresses = await server.add(agent(0)), await server.add(slow)
    reports.follow(KEY, seen(*addresses))
    first = answers.seconds_left(KEY)
    assert NEW_POD_SECONDS < first <= START_SECONDS

    async def is_woken() -> bool:
        return bool(woken)

    await until(is_woken, "the first agent's answer")
    assert 0 < answers.seconds_left(KEY) < first
    reports.follow(KEY, seen(addresses[0]))  # the pod is gone
    assert answers.seconds_left(KEY) == 0


async def test_later_decisions_wait_a_moment_for_new_pods(
    server: AgentServer, reports: AgentReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_answers, "NEW_POD_SECONDS", 0.3)
    answers = FirstAnswers((reports,))
    assert answers.seconds_left(KEY) == 0
    reports.follow(KEY, seen(await server.add(agent(0, silent=True))))
    assert 0 < answers.seconds_left(KEY) <= 0.3
    await asyncio.sleep(0.4)
    assert answers.seconds_left(KEY) == answers.seconds_left(KEY) == 0
    answers.forget(KEY)
    assert answers.seconds_left(KEY) > 0.3
