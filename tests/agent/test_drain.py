"""The end of a server: open requests finish after one signal, and end with an error after two."""

import concurrent.futures
import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.agent.conftest import MODEL
from tests.fork_server import pids_of

COMPLETION = "/v1/completions"
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "import", "max_tokens": 300, "ignore_eos": True, "stream": True}
ENDLESS: dict[str, Any] = {**SHORT, "max_tokens": 3900, "n": 4}


@pytest.fixture
def draining(start_server):
    return start_server("--accept-seconds=2", "--kv-cache-memory-bytes=64MiB")


class StreamReader(threading.Thread):
    """Reads one stream to its end. `begun` is set with its first bytes."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.text = ""
        self._url = url
        self._body = body
        self.start()
        assert self.begun.wait(30)

    def run(self) -> None:
        with httpx.stream("POST", self._url + COMPLETION, json=self._body, timeout=90) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()

    def result(self, seconds: float) -> str:
        self.join(seconds)
        assert not self.is_alive()
        return self.text

    def last_event(self, seconds: float) -> Any:
        return json.loads(self.result(seconds).rstrip().rpartition("\n")[2].removeprefix("data: "))


def wait_until_unready(server: Any) -> None:
    """Waits until the server has handled its signal."""
    deadline = time.monotonic() + 60
    while server.http.get("/ready").status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_accepted(server: Any, requests: int) -> None:
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") < requests:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_sigterm_lets_open_requests_finish(start_server):
    draining = start_server("--accept-seconds=10", "--kv-cache-memory-bytes=64MiB")
    stream = StreamReader(draining.url, SHORT)
    draining.signal(signal.SIGTERM)
    wait_until_unready(draining)
    health = draining.http.get("/health")
    assert health.status_code == 200, "but not unhealthy"
    assert health.headers["connection"] == "close"
    late = httpx.post(draining.url + COMPLETION, json={"model": MODEL, "prompt": "late", "max_tokens": 2}, timeout=30)
    assert late.status_code == 200, "requests of load balancers that lag behind are served"
    assert late.headers["connection"] == "close"
    text = stream.result(90)
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert draining.wait_for_exit() == 0


def test_connections_are_refused_after_the_accept_seconds(draining):
    draining.signal(signal.SIGTERM)
    # A connection at the moment of closing is reset or gets no answer; later ones are refused.
    with pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)):
        for _ in range(300):
            time.sleep(0.1)
            httpx.get(draining.url + "/health")
    with pytest.raises(httpx.ConnectError):
        httpx.get(draining.url + "/health")
    assert draining.wait_for_exit() == 0


def test_a_second_sigterm_ends_each_stream_with_an_error(start_server):
    draining = start_server("--accept-seconds=60", "--kv-cache-memory-bytes=64MiB")
    streams = [StreamReader(draining.url, ENDLESS) for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(lambda: httpx.post(draining.url + COMPLETION, json={**ENDLESS, "stream": False}, timeout=60))
        wait_until_accepted(draining, 3 * ENDLESS["n"])
        draining.signal(signal.SIGTERM)
        wait_until_unready(draining)  # two signals at once may be one to a process
        draining.signal(signal.SIGTERM)
        began = time.monotonic()
        for stream in streams:
            assert stream.last_event(30)["error"]["code"] == "shutting_down"
        answer = whole.result(30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert draining.wait_for_exit() == 1, "requests were cut"
    assert time.monotonic() - began < 30


def test_sigint_ends_an_idle_server_at_once(draining):
    began = time.monotonic()
    draining.signal(signal.SIGINT)
    assert draining.wait_for_exit() == 0
    assert time.monotonic() - began < 30
    assert "Traceback" not in draining.errors


def test_every_route_reports_a_dead_core(draining):
    stream = StreamReader(draining.url, ENDLESS)
    _kill_core(draining.process.pid)
    assert stream.last_event(20)["error"]["type"] == "server_error"
    for path in ("/health", "/ready"):
        answer = draining.http.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
    answer = draining.http.post(COMPLETION, json={"prompt": "a"})
    assert answer.status_code == 503
    draining.signal(signal.SIGINT)
    assert draining.wait_for_exit() == 1, "not a success"


def _kill_core(parent: int) -> None:
    (core,) = pids_of(parent, "starling_engine.core")
    os.kill(core, signal.SIGKILL)
