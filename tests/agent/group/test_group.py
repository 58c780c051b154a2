"""Two nodes that serve one model: real agents, each with an engine core of its own."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.agent.node.conftest import Agent, StartAgent, StreamReader, complete, start_agent
from tests.ports import free_port

__all__ = ["start_agent"]
pytestmark = pytest.mark.timeout(400)
DATA = {"layout": {"data": 2, "per_node": 1}}


@pytest.fixture
def start_node(start_agent: StartAgent) -> Callable[..., Agent]:
    """start(number, leader=None, **changes): node 0 is the leader and comes first, or its admin port is given."""

    def start(number: int, leader: Agent | int | None = None, **changes: Any) -> Agent:
        port = leader.config["admin"]["port"] if isinstance(leader, Agent) else leader
        environment = {} if port is None else {"STARLING_LEADER": f"127.0.0.1:{port}"}
        return start_agent(pod=f"chat-1a2b3c4-0-{number}", environment=environment, **{**DATA, **changes})

    return start


def wait_for_ranks(agent: Agent, size: int) -> None:
    """Waits until the agent is ready and reports `size` data parallel ranks."""
    agent.reports(lambda report: report.ready and report.topology is not None and report.topology.data == size)


@pytest.mark.whole
def test_two_nodes_share_requests_and_one_goes_on_without_the_other(start_node: Callable[..., Agent]) -> None:
    first = start_node(0)
    second = start_node(1, first)
    for agent in (first, second):
        wait_for_ranks(agent, 2)
    report = second.report()
    assert (report.leader, first.report().leader, report.topology and report.topology.ranks) == (False, True, 2)
    assert [complete(agent).status_code for agent in (first, second)] == [200, 200]
    many_requests_reach_both_cores(first, second)
    a_node_of_another_revision_is_refused(start_node, first)
    only_the_leader_answers_polls_and_only_of_nodes(first, second)

    second.process.send_signal(signal.SIGKILL)
    wait_for_ranks(first, 1)
    assert "engine core 1 of chat-1a2b3c4-0-1" in (first.report().last_error or "")
    assert first.report().ready and complete(first).status_code == 200
    again = start_node(1, first)
    for agent in (first, again):
        wait_for_ranks(agent, 2)
    many_requests_reach_both_cores(again, first)


def many_requests_reach_both_cores(target: Agent, other: Agent) -> None:
    """All requests are sent to one node."""
    before = generated(target, other)

    async def send() -> list[int]:
        body = {"model": "pydoc", "max_tokens": 16, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=target.url, timeout=60.0, trust_env=False) as client:
            answers = [client.post("/v1/completions", json={**body, "prompt": f"import {n}"}) for n in range(8)]
            return [answer.status_code for answer in await asyncio.gather(*answers)]

    assert asyncio.run(send()) == [200] * 8
    gained = [now - then for now, then in zip(generated(target, other, sum(before) + 8 * 16), before, strict=True)]
    assert sum(gained) == 8 * 16 and min(gained) >= 16, "each core is counted once, by its own node"


def generated(first: Agent, second: Agent, enough: float = 0) -> list[float]:
    """Returns the tokens that each has counted, once they are enough and two more pings brought no others."""
    counts = [[agent.metric("vllm:generation_tokens_total") for agent in (first, second)]]
    deadline = time.monotonic() + 60
    while sum(counts[-1]) < enough or counts[-3:] != [counts[-1]] * 3:
        assert time.monotonic() < deadline, counts
        time.sleep(0.6)
        counts.append([agent.metric("vllm:generation_tokens_total") for agent in (first, second)])
    return counts[-1]


def a_node_of_another_revision_is_refused(start_node: Callable[..., Agent], leader: Agent) -> None:
    """The leader gives the reason, and the group goes on."""
    stranger = start_node(1, leader, revision="7654321")
    refused = stranger.reports(lambda report: report.last_error is not None)[-1]
    assert "the leader refuses this node" in (refused.last_error or "") and "7654321" in (refused.last_error or "")
    assert not refused.ready
    stranger.close()
    assert leader.report().ready and complete(leader).status_code == 200


def only_the_leader_answers_polls_and_only_of_nodes(leader: Agent, other: Agent) -> None:
    answer = other.admin.post("/admin/group", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_leader")
    assert f"127.0.0.1:{leader.config['admin']['port']}" in answer.text
    assert leader.admin.post("/admin/group", headers={"Authorization": "Bearer guess"}, json={}).status_code == 401
    answer = leader.admin.post("/admin/group", json={"node": "first"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert "incarnation" in answer.json()["error"]["message"]
    assert leader.admin.get("/admin/group").status_code == 405


def test_a_node_waits_for_its_leader_and_finds_it_again(start_node: Callable[..., Agent]) -> None:
    port = free_port()
    second = start_node(1, port)
    waiting = second.reports(lambda report: report.phase == "warming" and report.last_error is not None)[-1]
    assert f"the leader at http://127.0.0.1:{port}/admin/group does not answer" in (waiting.last_error or "")
    first = start_node(0, admin={"port": port})
    for agent in (first, second):
        wait_for_ranks(agent, 2)
    assert second.report().last_error is None

    first.process.send_signal(signal.SIGKILL)
    wait_for_ranks(second, 1)
    assert complete(second).status_code == 200, "it serves without its leader"
    again = start_node(0, admin={"port": port})
    for agent in (again, second):
        wait_for_ranks(agent, 2)


def test_a_node_that_drains_finishes_requests_of_other_nodes(start_node: Callable[..., Agent]) -> None:
    long_drain = {"seconds": 250}
    first = start_node(0, drain=long_drain)
    second = start_node(1, first, drain=long_drain)
    for agent in (first, second):
        wait_for_ranks(agent, 2)
    streams = [StreamReader(first, 1500) for _ in range(2)]
    deadline = time.monotonic() + 60
    while second.metric("vllm:num_requests_running") != 1:
        assert time.monotonic() < deadline, "one of the streams runs on the other node"
        time.sleep(0.1)
    assert second.end(seconds=280) == 0
    assert all(stream.result().endswith("data: [DONE]\n\n") for stream in streams)
    assert all('"finish_reason":"length"' in stream.text for stream in streams)
