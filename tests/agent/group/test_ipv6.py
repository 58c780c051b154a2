"""Groups of two nodes on a cluster with IPv6 alone: clients reach them, and they reach each other, at such addresses."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starling_agent.contract.listening import has_ipv6

from tests.agent.group.test_elastic import SETTINGS, scale, serves
from tests.agent.group.test_group import wait_for_ranks
from tests.agent.group.test_multi_node_rank import greedy_text
from tests.agent.node.conftest import Agent, StartAgent, start_agent

__all__ = ["start_agent"]
pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")]
LISTENS = {"endpoint": {"host": "::1"}, "admin": {"host": "::1"}}


@pytest.fixture
def start_node(start_agent: StartAgent) -> Callable[..., Agent]:
    """Starts nodes as in test_group, with ::1 as the address of all: start(number, leader=None, **changes)."""

    def start(number: int, leader: Agent | None = None, **changes: Any) -> Agent:
        environment = {"STARLING_POD_IP": "::1"}
        if leader is not None:
            environment["STARLING_LEADER"] = f"[::1]:{leader.config['admin']['port']}"
        agent = start_agent(pod=f"chat-1a2b3c4-0-{number}", environment=environment, **LISTENS, **changes)
        agent.url = f"http://[::1]:{agent.config['endpoint']['port']}"
        agent.http.base_url = httpx.URL(agent.url)
        agent.admin.base_url = httpx.URL(f"http://[::1]:{agent.config['admin']['port']}")
        return agent

    return start


def test_a_model_split_over_two_nodes_answers_from_both(start_node: Callable[..., Agent]) -> None:
    layout = {"layout": {"pipeline": 2, "per_node": 1}}
    second = start_node(1, first := start_node(0, **layout), **layout)
    for agent in (first, second):
        wait_for_ranks(agent, 1)
    assert len({greedy_text(agent) for agent in (first, second)}) == 1


@pytest.mark.whole
def test_a_group_grows_by_a_node_that_takes_over_experts(start_node: Callable[..., Agent]) -> None:
    second = start_node(1, first := start_node(0, **SETTINGS), **SETTINGS)
    scale(first, "one", 1)
    scale(first, "two", 2)
    for agent in (first, second):
        agent.reports(serves(2))
    assert len({greedy_text(agent) for agent in (first, second)}) == 1
