"""The lifecycle of a node: loading, a killed engine, a hung one, no restarts left, and the end."""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from starling_agent.contract.backend import BackendState
from starling_agent.contract.report import Report
from starling_agent.openai.responses.folder_store import FolderStore
from starling_agent.openai.responses.ids import ResponsePod, pod_of
from starling_agent.openai.responses.store import StoreLimits

from tests.agent.node.certificates import make_certificate
from tests.agent.node.conftest import Agent, StartAgent, StreamReader, complete
from tests.engine.encoder_checkpoints import CLASSIFIERS, ENCODERS, write_encoder, write_tokenizer
from tests.fork_server import SLOWLY
from tests.ports import free_port

RESPONSE = {"model": "pydoc", "input": "import", "max_output_tokens": 1}
LONG_RESPONSE = {
    "model": "pydoc",
    "input": "import",
    "background": True,
    "temperature": 0,  # random tokens may be so short that they fill the model's length
    "structured_outputs": {"regex": "[a-z ]{9999}"},
}


def phases(reports: Sequence[Report]) -> list[str]:
    return list(dict.fromkeys(report.phase for report in reports))


def test_a_killed_engine_is_restarted_in_place_until_no_restart_is_left(start_agent: StartAgent):
    endpoint = {"allowed_origins": ["https://app.example"]}
    agent = start_agent(endpoint=endpoint, recovery={"engine_restarts": 1}, environment=SLOWLY)
    clients_and_probes_see_that_it_loads(agent)
    before = agent.until("serving")[-1]
    counted = agent.metric("vllm:generation_tokens_total")
    stream = StreamReader(agent, 3900)
    responses = [agent.http.post("/v1/responses", json=body).json()["id"] for body in (RESPONSE, LONG_RESPONSE)]
    os.kill(agent.core_pid(), signal.SIGKILL)
    down = agent.reports(lambda report: report.phase == "restarting")[-1]
    assert "SIGKILL" in (down.last_error or "")
    assert (down.ready, down.healthy, down.token_seen, down.fatal, down.topology) == (False, True, False, False, None)
    assert [(rank.healthy, rank.error) for rank in down.ranks] == [(False, down.last_error)]
    assert stream.last_event()["error"]["type"] == "server_error"
    waiting = complete(agent)
    assert waiting.status_code == 503 and "restarting" in waiting.text
    up = agent.reports(lambda report: report.ready)
    assert phases(up)[0] == "restarting" and phases(up)[-1] == "serving" and "loading" in phases(up)
    assert up[-1].engine_restarts == 1 and up[-1].token_seen
    assert up[-1].incarnation == before.incarnation and up[-1].topology == before.topology
    assert [report.version for report in up] == sorted({report.version for report in up})
    assert complete(agent).status_code == 200
    state = BackendState.model_validate(agent.http.get("/backend").json())
    assert (state.pod, state.group, state.revision) == ("chat-1a2b3c4-0-0", "chat-1a2b3c4-0", "1a2b3c4")
    assert agent.metric("vllm:generation_tokens_total") > counted, "counters go on"
    assert agent.metric("starling:agent_engine_restarts_total") == 1
    assert all(pod_of(response_id) == ResponsePod("chat-1a2b3c4-0", 0) for response_id in responses)
    statuses = [agent.http.get(f"/v1/responses/{response_id}").json()["status"] for response_id in responses]
    assert statuses == ["incomplete", "failed"], "what is stored outlives the engine"
    os.kill(agent.core_pid(), signal.SIGKILL)
    it_fails_and_reports_the_cause(agent)


def clients_and_probes_see_that_it_loads(agent: Agent) -> None:
    loading = agent.until("loading")[-1]
    assert not loading.ready and loading.healthy and not loading.token_seen
    answer = agent.http.post("/v1/chat/completions", json={}, headers={"Origin": "https://app.example"})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.json()["error"]["code"] == "engine_not_ready"
    assert "loading" in answer.json()["error"]["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert answer.headers["x-request-id"]
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert [agent.admin.get(path).status_code for path in ("/live", "/health", "/ready")] == [200, 200, 503]
    assert agent.http.get("/ready").status_code == 503
    assert agent.http.get("/version").status_code == 200
    assert 'starling:agent_phase{phase="loading"} 1.0' in agent.http.get("/metrics").text


def it_fails_and_reports_the_cause(agent: Agent) -> None:
    failed = agent.until("failed")[-1]
    assert (failed.healthy, failed.ready, failed.fatal) == (False, False, False)
    assert "SIGKILL" in (failed.last_error or "")
    assert agent.admin.get("/health").status_code == 503
    assert agent.admin.get("/live").status_code == 200, "the kubelet must not restart the container"
    answer = complete(agent)
    assert answer.status_code == 503 and "SIGKILL" in answer.json()["error"]["message"]
    assert agent.end() == 1
    assert agent.errors.splitlines()[-1] == failed.last_error


def test_metrics_name_the_caches_type_before_there_is_an_engine(start_agent: StartAgent):
    agent = start_agent(engine={"kv_cache_dtype": "fp8_e4m3", "block_size": 32})
    agent.first_report()
    (line,) = [line for line in agent.http.get("/metrics").text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="32"' in line and 'cache_dtype="fp8_e4m3"' in line


def test_sigterm_ends_a_node_at_once_while_it_loads(start_agent: StartAgent):
    agent = start_agent(drain={"accept_seconds": 30}, environment=SLOWLY)
    agent.until("loading")
    began = time.monotonic()
    assert agent.end() == 0, "no request was accepted"
    assert time.monotonic() - began < 25
    assert "Traceback" not in agent.errors


def test_a_hung_engine_is_restarted(start_agent: StartAgent):
    """Its Service never answers meanwhile, and the node is ready all the same."""
    agent = start_agent(endpoint={"service_url": f"http://127.0.0.1:{free_port()}"})
    assert agent.reports(lambda report: report.service_token_seen is False)[-1].ready
    core = agent.core_pid()
    os.kill(core, signal.SIGSTOP)
    assert "not answered" in (agent.until("restarting")[-1].last_error or "")
    agent.reports(lambda report: report.ready)
    assert agent.core_pid() != core
    assert not Path(f"/proc/{core}").exists(), "the old core has ended"


async def test_sigterm_lets_open_streams_and_responses_finish(start_agent: StartAgent, tmp_path: Path):
    agent = start_agent(drain={"accept_seconds": 2}, endpoint={"response_store": str(tmp_path / "responses")})
    agent.until("serving")
    response = agent.http.post("/v1/responses", json=LONG_RESPONSE).json()
    stream = StreamReader(agent, 300)
    agent.process.send_signal(signal.SIGTERM)
    draining = agent.until("draining")[-1]
    assert (draining.ready, draining.healthy) == (False, True)
    assert agent.admin.get("/ready").status_code == 503
    assert agent.admin.get("/health").status_code == 200
    assert stream.result().endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in stream.text
    assert agent.process.wait(60) == 0
    stored = await FolderStore(tmp_path / "responses", StoreLimits(64 << 20, 3600.0)).get(response["id"], None)
    assert stored.status == "completed"


def test_a_second_sigterm_ends_open_streams_with_an_error(start_agent: StartAgent):
    agent = start_agent()
    agent.until("serving")
    stream = StreamReader(agent, 3900)
    agent.process.send_signal(signal.SIGTERM)
    agent.until("draining")  # two signals at once may be one to a process
    began = time.monotonic()
    assert agent.end() == 1
    assert time.monotonic() - began < 25
    assert stream.last_event(30)["error"]["code"] == "shutting_down"
    assert "open requests" in agent.errors.splitlines()[-1]


def test_streams_end_with_an_error_before_a_pod_with_less_time_than_its_drain_is_killed(start_agent: StartAgent):
    agent = start_agent()
    agent.until("serving")
    stream = StreamReader(agent, 3900)
    agent.process.send_signal(signal.SIGTERM)
    agent.until("draining")
    for seconds, status in (("soon", 400), ("600", 200), ("4.9", 200)):
        assert agent.admin.get("/admin/report", params={"ends_in": seconds}).status_code == status
    assert stream.last_event(30)["error"]["code"] == "shutting_down"
    assert agent.process.wait(30) == 1


def test_an_engine_that_dies_while_draining_is_not_started_again(start_agent: StartAgent):
    agent = start_agent(drain={"accept_seconds": 30})
    agent.until("serving")
    stream = StreamReader(agent, 3900)
    agent.process.send_signal(signal.SIGTERM)
    agent.until("draining")
    os.kill(agent.core_pid(), signal.SIGKILL)
    assert "error" in stream.last_event(20)
    assert agent.process.wait(20) == 1
    assert "SIGKILL" in agent.errors.splitlines()[-1]


def test_a_token_comes_through_the_service_with_a_key_and_tls(start_agent: StartAgent, tmp_path: Path):
    """Its own endpoint acts as the Service, under a name that the certificate does not have."""
    certificate, key = make_certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    port = free_port()
    agent = start_agent(
        endpoint={
            "port": port,
            "service_url": f"https://127.0.0.1:{port}",
            "api_key_file": str(keys),
            "tls_cert_file": str(certificate),
            "tls_key_file": str(key),
        }
    )
    agent.reports(lambda report: report.service_token_seen is True)
    assert agent.report().ready
    assert complete(agent).status_code == 401
    agent.http.headers["Authorization"] = "Bearer open-sesame"
    assert complete(agent).status_code == 200
    assert agent.end() == 0


def test_an_agent_of_a_model_that_gives_labels_alone_is_ready(start_agent: StartAgent, tmp_path: Path) -> None:
    write_encoder(tmp_path / "bert", CLASSIFIERS["bert"])
    write_tokenizer(tmp_path / "bert")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in ("Transformer", "LSTM")]
    (tmp_path / "bert" / "modules.json").write_text(json.dumps(modules))
    agent = start_agent(model={"source": (tmp_path / "bert").as_uri()}, engine={"kv_cache_memory_bytes": None})
    assert agent.reports(lambda report: report.ready or report.phase == "failed")[-1].ready
    assert "LSTM" in agent.http.post("/v1/embeddings", json={"model": "pydoc", "input": "a list"}).text


def test_an_agent_of_an_encoder_is_ready_without_a_token(start_agent: StartAgent, tmp_path: Path) -> None:
    write_encoder(tmp_path / "bert", ENCODERS["bert"])
    write_tokenizer(tmp_path / "bert")
    source = {"source": (tmp_path / "bert").as_uri()}
    agent = start_agent(model=source, engine={"kv_cache_memory_bytes": None})
    assert agent.reports(lambda report: report.ready)[-1].token_seen
    vector = agent.http.post("/v1/embeddings", json={"model": "pydoc", "input": "a list"})
    assert vector.status_code == 200, vector.text
    state = BackendState.model_validate(agent.http.get("/backend").json())
    assert state.load is not None and state.load.kv_blocks == 0
