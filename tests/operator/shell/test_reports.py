"""Long polls of agents: real HTTP, no Kubernetes."""

import asyncio
import time
from dataclasses import replace

import pytest
from starling_operator.agents.polls import MIN_POLL_SECONDS, WAIT_SECONDS
from starling_operator.agents.reports import AgentReports
from starling_operator.logs import Key
from starling_operator.plan.observed import Observed, Pod
from starling_operator.plan.pod_report import TOKEN_REFUSED

from tests.operator.plan.building import make_observed
from tests.operator.shell.agents import Agent, AgentServer, EagerAgent, EndlessAgent, InvalidAgent, serving
from tests.operator.shell.polled import reports as reports
from tests.operator.shell.polled import server as server
from tests.waiting import until

KEY = ("space", "chat")


def seen(*pods: Pod, token: str = "the token") -> Observed:
    """Returns the pods with their StatefulSet."""
    return make_observed(children={("StatefulSet", "chat-r-0"): {"metadata": {"uid": "set"}}}, pods=pods, token=token)


def pod(address: str, phase: str = "Running", owner: str = "set") -> Pod:
    names = {"name": "chat-r-0-0", "uid": "u", "group": "chat-r-0", "revision": "r"}
    return Pod(**names, number=0, owner=owner, address=address, phase=phase)


@pytest.fixture
def agent() -> Agent:
    return Agent(serving("chat-r-0-0", "chat-r-0", "r", "chat", "hash"), "the token")


async def test_a_report_comes_and_its_changes_wake(
    server: AgentServer, agent: Agent, reports: AgentReports, woken: list[Key]
) -> None:
    reports.follow(KEY, seen(pod(await server.add(agent))))
    await until(lambda: _has(reports, "serving"), "the first report")
    agent.update(phase="draining")
    await until(lambda: _has(reports, "draining"), "the changed report")
    assert woken == [KEY, KEY] and agent.polls <= 3, "a long poll, not a loop"


async def test_the_last_report_of_a_silent_agent_grows_old(
    server: AgentServer, agent: Agent, reports: AgentReports, woken: list[Key]
) -> None:
    address = await server.add(agent)
    reports.follow(KEY, seen(pod(address)))
    await until(lambda: _has(reports, "serving"), "the first report")
    await server.close()
    count = len(woken)

    async def is_old() -> bool:
        reply = reports.reply("u")
        return (
            reply is not None
            and reply.report is not None
            and reply.report.phase == "serving"
            and reply.age > 0.4
            and len(woken) > count
        )

    await until(is_old, "the report to grow old, and somebody to be woken for it")


async def test_another_token_is_used_at_once(server: AgentServer, agent: Agent, reports: AgentReports) -> None:
    address = await server.add(agent)
    reports.follow(KEY, seen(pod(address), token="wrong"))
    await until(lambda: _refused(reports, TOKEN_REFUSED), "the refusal")
    reports.follow(KEY, seen(pod(address)))
    await until(lambda: _has(reports, "serving"), "the report")


async def test_an_agent_is_notified_of_its_end_and_its_next_report_is_not_awaited(
    server: AgentServer, agent: Agent, reports: AgentReports
) -> None:
    running = pod(await server.add(agent))
    reports.follow(KEY, seen(running))
    await until(lambda: _has(reports, "serving"), "the first report")
    # Its group's StatefulSet is gone by then.
    going = seen(replace(running, deleted_at=time.time(), grace_ends_at=time.time() + 40))
    reports.follow(KEY, replace(going, children={}))
    assert reports.has_tried(KEY)

    async def knows() -> bool:
        return agent.ends_in is not None and 35 < agent.ends_in <= 40

    await until(knows, "the agent to be notified")


async def test_a_poll_that_takes_the_place_of_another_waits_for_the_rest_of_its_time(
    server: AgentServer, agent: Agent, reports: AgentReports
) -> None:
    running = pod(await server.add(agent))
    reports.follow(KEY, seen(running))
    await until(lambda: _is_true(agent.polls == 2), "the poll that waits")
    first = agent.wait
    await asyncio.sleep(0.5)
    reports.follow(KEY, seen(replace(running, deleted_at=time.time(), grace_ends_at=time.time() + 40)))
    await until(lambda: _is_true(agent.polls == 3), "the poll that notifies it")
    assert WAIT_SECONDS - 1.5 < first <= WAIT_SECONDS
    assert agent.wait <= first - 0.5


async def test_a_report_that_grew_old_is_asked_for_at_once(
    server: AgentServer, agent: Agent, reports: AgentReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starling_operator.agents.polls.WAIT_SECONDS", 0.4)
    address = await server.add(agent)
    reports.follow(KEY, seen(pod(address)))
    await until(lambda: _has(reports, "serving"), "the first report")
    await server.remove(address)

    async def is_old() -> bool:
        reply = reports.reply("u")
        return reply is not None and reply.age > 0.4

    await until(is_old, "the report to grow old")
    agent.polls = 0
    await server.restore(address, agent)
    await until(lambda: _is_true(agent.polls > 0), "another poll")
    assert agent.wait == 0.0


async def test_only_running_pods_of_its_own_sets_are_polled_and_gone_ones_are_forgotten(
    server: AgentServer, agent: Agent, reports: AgentReports
) -> None:
    address = await server.add(agent)
    reports.follow(KEY, seen(pod(address, phase="Pending")))
    reports.follow(KEY, seen(pod(address, owner="somebody else's")))
    await asyncio.sleep(0.2)
    assert agent.polls == 0
    reports.follow(KEY, seen(pod(address)))
    await until(lambda: _has(reports, "serving"), "the report")
    reports.forget(KEY)
    assert reports.reply("u") is None


async def test_an_endless_answer_is_cut_off_and_the_report_before_it_is_dropped(
    server: AgentServer, agent: Agent, reports: AgentReports, woken: list[Key]
) -> None:
    endless = EndlessAgent(agent.report, agent.token)
    address = await server.add(agent)
    reports.follow(KEY, seen(pod(address)))
    await until(lambda: _has(reports, "serving"), "the first report")
    server.replace(address, endless)
    agent.update(phase="draining")
    await until(lambda: _refused(reports, "longer than"), "the answer to be refused")
    assert endless.sent < 16 * 1024 * 1024, "no more is read than the sockets' buffers hold"
    assert len(woken) >= 2, "it is news"


@pytest.mark.parametrize(
    ("news", "field"),
    [({"epoch": -5}, "epoch"), ({"topology": {"tensor": -1, "pipeline": 1, "data": 1, "ranks": 1}}, "topology.tensor")],
)
async def test_an_invalid_report_is_refused_by_its_field(
    server: AgentServer, agent: Agent, reports: AgentReports, news: dict[str, object], field: str
) -> None:
    invalid = InvalidAgent(agent.report, agent.token, fields=news)
    reports.follow(KEY, seen(pod(await server.add(invalid))))
    await until(lambda: _refused(reports, f"cannot be read: {field}: "), "the report to be refused")


async def test_an_agent_that_answers_all_the_time_is_polled_at_a_limited_rate(
    server: AgentServer, agent: Agent, reports: AgentReports, woken: list[Key]
) -> None:
    eager = EagerAgent(agent.report, agent.token)
    reports.follow(KEY, seen(pod(await server.add(eager))))
    began = time.monotonic()
    await until(lambda: _is_true(eager.polls >= 5), "five answers")
    assert time.monotonic() - began > 4 * MIN_POLL_SECONDS
    assert len(woken) <= eager.polls


async def _is_true(found: bool) -> bool:
    return found


async def _refused(reports: AgentReports, words: str) -> bool:
    reply = reports.reply("u")
    return reply is not None and reply.report is None and words in reply.error


async def _has(reports: AgentReports, phase: str) -> bool:
    reply = reports.reply("u")
    return reply is not None and reply.report is not None and reply.report.phase == phase
