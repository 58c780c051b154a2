"""The admin endpoint of a node that serves: its report, its token, and long polls."""

import hashlib
import json
import threading
import time
from pathlib import Path

import pytest
from starling_agent.contract.report import Topology

from tests.agent.node.conftest import TOKEN, Agent, complete


def test_the_report_describes_the_engine_that_serves(agent: Agent):
    report = agent.report()
    assert (report.phase, report.ready, report.healthy, report.token_seen, report.fatal) == ("serving", True, True, True, False)
    assert (report.service, report.revision, report.group, report.node) == ("chat", "1a2b3c4", "chat-1a2b3c4-0", 0)
    assert report.topology == Topology(tensor=1, pipeline=1, data=1, expert=1, ranks=1)
    assert [(rank.rank, rank.worker, rank.healthy) for rank in report.ranks] == [(0, 0, True)]
    assert [(start.core, start.rank) for start in report.starts] == [(0, 0)]
    assert list(report.starts[0].seconds) == ["init", "load", "allocate", "warm up"] and report.starts[0].seconds["load"] > 0
    assert report.kv is not None and report.kv.block_size == 16 and report.kv.num_blocks > 100
    assert report.kv.bytes <= 64 << 20 and report.kv.max_tokens > 1000
    assert report.service_token_seen is None, "there is no Service"
    assert report.engine_restarts == 0 and report.last_error is None


def test_the_report_has_the_configurations_hash(agent: Agent):
    content = (agent.folder / "agent.json").read_bytes()
    assert agent.report().config_hash == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
def test_probes_need_no_token(agent: Agent, path: str):
    assert agent.admin.get(path, headers={"Authorization": ""}).status_code == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"])
def test_the_report_needs_the_token(agent: Agent, value: str):
    before = agent.report()
    answer = agent.admin.get("/admin/report?after=x", headers={"Authorization": value.encode("latin-1")})
    assert answer.status_code == 401, "before the query is read"
    assert answer.json()["error"]["code"] == "invalid_admin_token"
    assert "phase" not in answer.text
    assert agent.report() == before


def test_the_token_is_read_again_when_its_file_changes(agent: Agent):
    file = Path(agent.config["admin"]["token_file"])
    try:
        file.write_text("another one")
        assert agent.admin.get("/admin/report").status_code == 401
        file.write_text("")
        assert agent.admin.get("/admin/report").status_code == 401
        file.unlink()
        assert agent.admin.get("/admin/report").status_code == 401
    finally:
        file.write_text(TOKEN)
    assert agent.admin.get("/admin/report").status_code == 200


def test_a_long_poll_without_a_change_is_answered_after_its_time(agent: Agent):
    version = agent.report().version
    began = time.monotonic()
    assert agent.report(after=version, wait=0.6).version == version
    assert 0.5 < time.monotonic() - began < 30


@pytest.mark.parametrize("query", ["", "after=-1&wait=30", "after=99999&incarnation=other&wait=30", "after=99999&wait=0"])
def test_a_poll_that_need_not_wait_is_answered_at_once(agent: Agent, query: str):
    began = time.monotonic()
    assert agent.admin.get(f"/admin/report?{query}").status_code == 200
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("query", ["after=x", "wait=soon", "after=1.5", "wait=nan", "wait=inf"])
def test_a_malformed_query_is_refused_and_named(agent: Agent, query: str):
    answer = agent.admin.get(f"/admin/report?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_requests_do_not_change_the_reports_version(agent: Agent):
    before = agent.report().version
    assert complete(agent).status_code == 200
    assert agent.report().version == before


def test_other_paths_and_methods_are_refused(agent: Agent):
    assert agent.admin.get("/admin").status_code == 404
    assert agent.admin.post("/admin/report").status_code == 405


def test_the_endpoint_is_the_one_that_starling_serve_has(agent: Agent):
    assert agent.http.get("/v1/models").json()["data"][0]["id"] == "pydoc"
    assert agent.http.get("/ready").status_code == 200
    assert agent.http.get("/v1/nothing").json()["error"]["code"] == "not_found"


def test_metrics_have_the_phase(agent: Agent):
    text = agent.http.get("/metrics").text
    assert 'starling:agent_phase{phase="serving"} 1.0' in text
    assert 'starling:agent_phase{phase="failed"} 0.0' in text
    assert "starling:agent_engine_restarts_total 0.0" in text
    assert agent.metric("vllm:generation_tokens_total") >= 1


def test_logs_name_pod_group_and_service(agent: Agent):
    lines = [json.loads(line) for line in agent.errors.splitlines()]
    names = {(line["pod"], line["group"], line["service"]) for line in lines}
    assert names == {("chat-1a2b3c4-0-0", "chat-1a2b3c4-0", "chat")}
    assert any(line["logger"] == "starling.worker" for line in lines), "the engine core's lines too"


def test_many_polls_wait_at_once_while_requests_are_served(agent: Agent):
    version = agent.report().version
    threads = [threading.Thread(target=agent.report, args=(version, 1.0)) for _ in range(16)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    assert complete(agent).status_code == 200
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - began < 16, "one after another takes 16 s"


def test_the_agents_process_does_not_load_torch(agent: Agent):
    maps = Path(f"/proc/{agent.process.pid}/maps").read_text()
    assert "libtorch" not in maps
