"""POST /sleep, POST /wake_up and GET /is_sleeping of a live server, as tools that know vLLM's call them."""

import threading
from typing import Any

import httpx
import pytest

from tests.agent.conftest import LiveServer, StartServer
from tests.agent.test_metrics import scrape

BODY: dict[str, Any] = {"prompt": "import", "max_tokens": 8, "temperature": 0.0}
ENDLESS: dict[str, Any] = {"prompt": "import", "max_tokens": 3900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def sleeper(start_server: StartServer) -> LiveServer:
    return start_server("--enable-sleep-mode", "--kv-cache-memory-bytes", "64MiB", "--num-threads", "1")


def error_of(answer: httpx.Response, status: int, code: str) -> Any:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    return error


def states(http: httpx.Client) -> dict[str, float]:
    """Returns the sleep states of /metrics."""
    return {sample.labels["sleep_state"]: sample.value for sample in scrape(http)["vllm:engine_sleep_state"].samples}


AWAKE = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
OFFLOADED = {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
DISCARDED = {"awake": 0, "weights_offloaded": 0, "discard_all": 1}


def test_an_engine_sleeps_and_wakes_with_the_same_output(sleeper: LiveServer) -> None:
    http = sleeper.http
    before = http.post("/v1/completions", json=BODY).json()["choices"]
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    for query, asleep in {"": OFFLOADED, "?level=1": OFFLOADED, "?level=2": DISCARDED}.items():
        assert states(http) == AWAKE
        assert http.post(f"/sleep{query}").json() == {"is_sleeping": True}
        assert states(http) == asleep
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        answer = http.post("/v1/completions", json=BODY)
        assert "POST /wake_up" in error_of(answer, 503, "engine_asleep")["message"]
        assert answer.headers["Retry-After"] == "10"
        error_of(http.get("/ready"), 503, "engine_asleep")
        assert http.get("/health").status_code == 200
        assert http.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
        assert states(http) == asleep, "until all memory is back"
        assert http.post("/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json=BODY).json()["choices"] == before
    assert http.post("/wake_up").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("query", "param"), [("level=0", "level"), ("level=deep", "level"), ("level=-1", "level"), ("mode=keep", "mode")]
)
def test_a_wrong_query_is_refused_and_its_parameter_named(query: str, param: str, sleeper: LiveServer) -> None:
    assert error_of(sleeper.http.post(f"/sleep?{query}"), 400, "invalid_value")["param"] == param
    assert error_of(sleeper.http.post("/wake_up?tags=kv"), 400, "invalid_value")["param"] == "tags"
    assert sleeper.http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_an_open_stream_prevents_sleep_or_is_aborted(sleeper: LiveServer) -> None:
    begun, text = threading.Event(), []

    def read() -> None:
        with sleeper.http.stream("POST", "/v1/completions", json=ENDLESS) as answer:
            for piece in answer.iter_text():
                text.append(piece)
                begun.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert begun.wait(30)
    assert "mode=wait" in error_of(sleeper.http.post("/sleep"), 409, "sleep_refused")["message"]
    assert sleeper.http.post("/sleep?level=1&mode=abort").json() == {"is_sleeping": True}
    reader.join(30)
    assert not reader.is_alive() and '"finish_reason":"abort"' in "".join(text) and "[DONE]" in text[-1]
    assert sleeper.http.post("/wake_up").json() == {"is_sleeping": False}


def test_the_log_has_requests_refused_during_sleep(sleeper: LiveServer) -> None:
    sleeper.http.post("/sleep")
    error_of(sleeper.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "too-early"}), 503, "engine_asleep")
    sleeper.http.post("/wake_up")
    assert "the engine sleeps" in sleeper.wait_for_line("too-early", '"refused"')


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}])
def test_a_page_of_another_origin_neither_puts_it_to_sleep_nor_wakes_it(headers: dict[str, str], sleeper: LiveServer) -> None:
    for path in ("/sleep", "/wake_up"):
        assert "allowed" in error_of(sleeper.http.post(path, headers=headers), 403, "origin_not_allowed")["message"]
    assert sleeper.http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_the_api_page_documents_refusals(sleeper: LiveServer) -> None:
    paths = sleeper.http.get("/openapi.json").json()["paths"]
    for path in ("/sleep", "/wake_up"):
        assert {"400", "401", "403", "409", "503"} <= paths[path]["post"]["responses"].keys()


def test_without_sleep_mode_there_are_no_such_routes(server: LiveServer) -> None:
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        error_of(server.http.request(method, path), 404, "not_found")
