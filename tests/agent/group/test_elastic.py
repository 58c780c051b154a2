"""A group whose leader changes its size while it serves: real agents, whose engine cores share the experts."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable

import httpx
import pytest
from starling_agent.contract.report import Report
from starling_agent.contract.scale import Operation

from tests.agent.group.test_group import start_node
from tests.agent.node.conftest import MODEL, Agent, start_agent

__all__ = ["start_agent", "start_node"]
pytestmark = pytest.mark.timeout(400)
PROMPTS = ["import", "def", "class", "return"]
LENGTH = 120


SETTINGS = {
    "model": {"source": (MODEL.parent / "starling-random-moe").as_uri()},
    "engine": {"enable_expert_parallel": True, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16},
    "layout": {"data": 1, "per_node": 1, "elastic": {"min": 1, "max": 4}},
    "recovery": {"progress_timeout_seconds": 10},
}
"""Configuration of every agent of an elastic group."""


def put(leader: Agent, name: str, data: int) -> httpx.Response:
    return leader.admin.put("/admin/scale", json={"operation": name, "data": data})


def scale(leader: Agent, name: str, data: int) -> Operation:
    """Sends an operation and waits for its end."""
    leader.first_report()
    assert put(leader, name, data).status_code == 202
    ended = leader.reports(lambda report: report.operation is not None and report.operation.id == name and report.operation.ended)
    operation = ended[-1].operation
    assert operation is not None and operation.phase == "done", operation
    return operation


def serves(size: int) -> Callable[[Report], bool]:
    def check(report: Report) -> bool:
        return report.ready and report.topology is not None and (report.topology.data, report.topology.expert) == (size, size)

    return check


class StreamingClients:
    """Clients that read one completion after another, until they are stopped."""

    def __init__(self, agents: list[Agent]) -> None:
        self.texts: dict[str, set[str]] = {prompt: set() for prompt in PROMPTS}
        self.errors: list[str] = []
        self.done = 0
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(agents[i % len(agents)], p)) for i, p in enumerate(PROMPTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, agent: Agent, prompt: str) -> None:
        body = {"model": "pydoc", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "stream": True}
        while not self._stopped.is_set():
            try:
                with httpx.stream("POST", f"{agent.url}/v1/completions", json=body, timeout=60.0, trust_env=False) as answer:
                    events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
                return
            if events[-1] != "[DONE]":
                self.errors.append(events[-1])
                return
            self.texts[prompt].add("".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]))
            self.done += 1

    def read_more(self, count: int = 6) -> None:
        wanted, deadline = self.done + count, time.monotonic() + 60
        while self.done < wanted:
            assert time.monotonic() < deadline and not self.errors, self.errors
            time.sleep(0.05)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors


@pytest.mark.whole  # on a cluster, one does so each time
def test_a_group_grows_and_shrinks_while_clients_stream(start_node: Callable[..., Agent]) -> None:
    first = start_node(0, **SETTINGS)
    second = start_node(1, first, **SETTINGS)
    waiting = first.reports(lambda report: report.size.joined == 2)[-1]
    assert not waiting.ready and waiting.operation is None, "the operator has not given its size yet"
    first_size = scale(first, "one", 1)
    assert (first_size.source, first_size.target, first_size.nodes, first_size.epoch) == (0, 1, 1, 1)
    first.reports(serves(1))
    assert not second.report().ready, "it is in no epoch"

    streams = StreamingClients([first])
    streams.read_more()
    operation = scale(first, "two", 2)
    assert set(operation.seconds) == {"waiting", "preparing", "committing", "releasing"} and operation.epoch == 2
    for agent in (first, second):
        report = agent.reports(serves(2))[-1]
        assert report.topology is not None and report.topology.ranks == 2 and report.epoch == 2
    assert first.report().size.effective == 2
    clients_of_second = StreamingClients([second])
    streams.read_more()
    clients_of_second.read_more()

    bad_operations_are_refused(first, second)

    scale(first, "back", 1)
    left = second.reports(lambda report: not report.ready)[-1]
    assert left.phase == "serving", "its open streams go on through it"
    for clients in (streams, clients_of_second):
        clients.read_more(3)
        clients.stop()
    for prompt in PROMPTS:
        assert len(streams.texts[prompt] | clients_of_second.texts[prompt]) == 1, "the size changes no token"
    assert put(first, "back", 1).json()["phase"] == "done", "the same id is the same operation"
    committed = 'starling:elastic_operation_seconds_count{phase="committing"} 3.0'
    assert committed in first.http.get("/metrics").text
    assert first.report().size.effective == 1


def bad_operations_are_refused(first: Agent, second: Agent) -> None:
    def code(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["code"]

    assert code(put(second, "three", 3)) == (409, "not_leader")
    assert code(put(first, "five", 5)) == (400, "invalid_target")
    assert code(first.admin.get("/admin/scale", params={"operation": "other"})) == (404, "unknown_operation")
    assert code(first.admin.delete("/admin/scale", params={"operation": "two"})) == (409, "too_late")
    wrong = first.admin.put("/admin/scale", json={"operation": "x", "data": 3}, headers={"Authorization": "Bearer guess"})
    assert wrong.status_code == 401
    assert put(first, "three", 3).json()["phase"] == "waiting"
    assert code(put(first, "four", 4)) == (409, "operation_running")
    assert first.admin.delete("/admin/scale", params={"operation": "three"}).status_code == 202
    first.reports(lambda report: report.operation is not None and report.operation.phase == "cancelled")
    assert first.report().size.effective == 2


def test_a_group_that_lost_a_core_comes_back_with_its_size(start_node: Callable[..., Agent]) -> None:
    first = start_node(0, **SETTINGS)
    second = start_node(1, first, **SETTINGS)
    scale(first, "two", 2)
    for agent in (first, second):
        agent.reports(serves(2))
    os.kill(second.core_pid(), signal.SIGKILL)
    for agent in (first, second):
        agent.reports(lambda report: not report.ready, seconds=40)
    for agent in (first, second):
        agent.reports(serves(2), seconds=90)
    assert [agent.process.poll() for agent in (first, second)] == [None, None]
