"""A node that cannot serve reports the cause, or prints it as its last line if it cannot even report."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.agent.node.conftest import StartAgent, configuration
from tests.ports import free_port

WHOLE = pytest.mark.whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"source": 5}}, ["model.source", "string"]),
        pytest.param({"engine": {"max_sequences": 4}}, ["engine.max_sequences", "no such argument", "max_num_seqs"], marks=WHOLE),
        pytest.param(
            {"endpoint": {"tls_cert_file": "/no/cert", "tls_key_file": "/no/key"}},
            ["endpoint.tls_cert_file", "/no/cert"],
            marks=WHOLE,
        ),
        pytest.param(
            {"endpoint": {"response_store": "/dev/null/responses"}}, ["endpoint.response_store", "/dev/null/responses"], marks=WHOLE
        ),
    ],
)
def test_a_wrong_field_is_reported_and_the_process_stays(start_agent: StartAgent, changes: dict[str, Any], words: list[str]):
    agent = start_agent(**changes)
    report = agent.until("failed")[-1]
    assert report.fatal and not report.healthy and not report.ready
    assert all(word in (report.last_error or "") for word in words), report.last_error
    assert agent.admin.get("/live").status_code == 200
    assert agent.admin.get("/ready").status_code == agent.admin.get("/health").status_code == 503
    assert agent.admin.get("/live", headers={"X-Long": "x" * 40_000}).status_code == 431
    assert agent.end() == 1
    assert agent.errors.splitlines()[-1] == report.last_error


def test_a_model_that_does_not_load_is_fatal_with_the_engines_message(start_agent: StartAgent, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}))
    agent = start_agent(model={"source": folder.as_uri()})
    report = agent.until("failed")[-1]
    assert report.fatal and "NobodyForCausalLM" in (report.last_error or "")
    answer = agent.http.get("/v1/models")
    assert answer.status_code == 503 and "NobodyForCausalLM" in answer.json()["error"]["message"]


def test_the_endpoint_has_its_limits_also_without_an_engine(start_agent: StartAgent, tmp_path: Path):
    limits = {"max_body_bytes": 2000, "read_seconds": 0.2, "rate_limit": {"requests": 2, "seconds": 3600}}
    agent = start_agent(model={"source": (tmp_path / "nothing").as_uri()}, endpoint={"port": free_port(), **limits})
    agent.until("failed")
    with socket.create_connection(("127.0.0.1", agent.config["endpoint"]["port"]), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
    answers = [agent.http.post("/v1/completions", content=b" " * size) for size in (2001, 2000, 2000)]
    assert [answer.status_code for answer in answers] == [413, 503, 429]
    assert agent.http.get("/health").status_code == 503, "the rate limit does not count probes"


def test_a_node_beyond_the_layout_is_refused(start_agent: StartAgent):
    agent = start_agent(pod="chat-1a2b3c4-0-1")
    report = agent.until("failed")[-1]
    assert report.fatal and report.node == 1 and "which has 1 nodes" in (report.last_error or "")


def test_a_port_in_use_is_reported(start_agent: StartAgent):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        report = start_agent(endpoint={"port": port}).until("failed")[-1]
    assert "endpoint.port" in (report.last_error or "") and str(port) in (report.last_error or "")


@pytest.mark.parametrize(
    ("text", "pod", "words"),
    [
        pytest.param("{", "chat-1a2b3c4-0-0", ["agent.json", "JSON"], marks=WHOLE),
        ('{"admin": {"port": 8001}}', "chat-1a2b3c4-0-0", ["admin.token_file"]),
        pytest.param(None, "chat", ["STARLING_POD_NAME", "chat"], marks=WHOLE),
    ],
)
def test_a_failure_that_cannot_be_reported_ends_with_code_2(start_agent: StartAgent, text: str | None, pod: str, words: list[str]):
    agent = start_agent(text=text, pod=pod)
    assert agent.process.wait(30) == 2
    last = agent.errors.splitlines()[-1]
    assert all(word in last for word in words), agent.errors


def test_an_admin_port_in_use_ends_the_agent_with_the_cause_as_last_line(start_agent: StartAgent, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        admin = {**configuration(tmp_path)["admin"], "port": other.getsockname()[1]}
        agent = start_agent(admin=admin)
        assert agent.process.wait(30) == 1
    assert agent.errors.splitlines()[-1].startswith("admin.port: cannot listen")
