"""One data parallel rank on two nodes: its core runs on the first, a worker on the second."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.agent.group.test_group import start_node, wait_for_ranks
from tests.agent.node.conftest import Agent, StreamReader, complete, start_agent
from tests.fork_server import pids_of

__all__ = ["start_agent", "start_node"]
pytestmark = pytest.mark.timeout(400)


def worker_pid(agent: Agent) -> int:
    (pid,) = pids_of(agent.process.pid, "starling_engine.worker")
    return pid


def greedy_text(agent: Agent) -> str:
    body = {"model": "pydoc", "prompt": "import", "max_tokens": 8, "temperature": 0}
    return str(agent.http.post("/v1/completions", json=body).json()["choices"][0]["text"])


@pytest.mark.parametrize("split", [pytest.param("pipeline", marks=pytest.mark.whole), "tensor"])
def test_a_model_on_two_nodes_survives_the_loss_of_a_worker_and_of_a_pod(start_node: Callable[..., Agent], split: str) -> None:
    layout: dict[str, Any] = {
        "layout": {split: 2, "per_node": 1},
        "recovery": {"progress_timeout_seconds": 5, "engine_restarts": 3},
    }
    second = start_node(1, first := start_node(0, **layout), **layout)
    for agent in (first, second):
        wait_for_ranks(agent, 1)
    topology = second.report().topology
    assert topology is not None and (getattr(topology, split), topology.ranks) == (2, 2)
    assert first.report().topology == topology
    assert [(start.core, start.rank) for start in first.report().starts] == [(0, 0), (0, 1)], "also of the worker of another node"
    assert len({greedy_text(agent) for agent in (first, second)}) == 1

    stream = StreamReader(second, 3900)
    os.kill(worker_pid(second), signal.SIGKILL)
    assert "error" in stream.last_event()
    down = first.reports(lambda report: report.phase == "restarting")[-1]
    assert "rank 1 on 127.0.0.1 is gone" in (down.last_error or "")
    for agent in (first, second):
        wait_for_ranks(agent, 1)
        assert complete(agent).status_code == 200
    assert [agent.process.poll() for agent in (first, second)] == [None, None], "started again in place"

    if split == "pipeline":
        another_pod_replaces_one_that_was_killed(start_node, first, second, layout)


def test_the_first_node_has_a_stage_and_half_of_another(start_node: Callable[..., Agent]) -> None:
    layout: dict[str, Any] = {"layout": {"tensor": 2, "pipeline": 3, "per_node": 3}}
    second = start_node(1, first := start_node(0, **layout), **layout)
    for agent in (first, second):
        wait_for_ranks(agent, 1)
        assert complete(agent).status_code == 200
    assert len(pids_of(first.core_pid(), "starling_engine.worker")) == 3
    assert len(pids_of(second.process.pid, "starling_engine.worker")) == 3


def another_pod_replaces_one_that_was_killed(
    start_node: Callable[..., Agent], first: Agent, second: Agent, layout: dict[str, Any]
) -> None:
    second.process.send_signal(signal.SIGKILL)
    assert "rank 1" in (first.reports(lambda report: not report.ready)[-1].last_error or "")
    again = start_node(1, first, **layout)
    for agent in (first, again):
        wait_for_ranks(agent, 1)
        assert complete(agent).status_code == 200
    stream = StreamReader(first, 1500)
    again.process.send_signal(signal.SIGTERM)
    report = first.reports(lambda report: not report.ready)[-1]
    assert (report.phase, report.healthy) == ("serving", True), "it takes no new requests, and finishes those that it has"
    assert first.end() == 0 and again.process.wait(120) == 0, "both wait for what is open"
    assert stream.result().endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in stream.text
