"""The end of a server: slow and complete after one signal, at once and honest after two."""

import concurrent.futures
import json
import signal
import time
from typing import Any

import httpx
import pytest

COMPLETION = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "import", "max_tokens": 2500, "ignore_eos": True, "stream": True}


@pytest.fixture
def leaving(start_server):
    return start_server("--accept-seconds=2", "--kv-cache-memory-bytes=64MiB")


def begin_stream(server: Any, pool: concurrent.futures.Executor) -> "concurrent.futures.Future[str]":
    stream = pool.submit(lambda: httpx.post(server.url + COMPLETION, json=LONG, timeout=60).text)
    deadline = time.monotonic() + 20
    while server.metric("vllm:generation_tokens_total") < 3:
        assert time.monotonic() < deadline
    return stream


def test_one_sigterm_finishes_what_is_open(leaving):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = begin_stream(leaving, pool)
        leaving.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert leaving.http.get("/ready").status_code == 503, "unready at once"
        health = leaving.http.get("/health")
        assert health.status_code == 200, "but not unhealthy"
        assert health.headers["connection"] == "close"
        late = httpx.post(leaving.url + COMPLETION, json={"prompt": "late", "max_tokens": 2}, timeout=30)
        assert late.status_code == 200, "requests of load balancers that lag behind are served"
        assert late.headers["connection"] == "close"
        text = stream.result(60)
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert leaving.wait_for_exit() == 0


def test_after_the_grace_the_door_is_closed(leaving):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = begin_stream(leaving, pool)
        leaving.signal(signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            for _ in range(100):
                time.sleep(0.1)
                httpx.get(leaving.url + "/health")
        leaving.signal(signal.SIGTERM)
        stream.result(60)
    leaving.wait_for_exit()


def test_a_second_sigterm_ends_each_stream_with_an_error(leaving):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        streams = [begin_stream(leaving, pool) for _ in range(2)]
        whole = pool.submit(lambda: httpx.post(leaving.url + COMPLETION, json={**LONG, "stream": False}, timeout=60))
        time.sleep(0.2)
        leaving.signal(signal.SIGTERM)
        time.sleep(0.2)
        leaving.signal(signal.SIGTERM)
        began = time.monotonic()
        for stream in streams:
            last = json.loads(stream.result(10).rstrip().rsplit("data: ", 1)[1])
            assert last["error"]["code"] == "shutting_down"
        answer = whole.result(10)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        assert leaving.wait_for_exit() == 1, "requests were cut"
    assert time.monotonic() - began < 8


def test_sigint_of_an_idle_server_ends_it_at_once(leaving):
    began = time.monotonic()
    leaving.signal(signal.SIGINT)
    assert leaving.wait_for_exit() == 0
    assert time.monotonic() - began < 6
    assert "Traceback" not in leaving.errors


def test_a_dead_core_is_told_everywhere(leaving):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = begin_stream(leaving, pool)
        _kill_core(leaving.process.pid)
        last = json.loads(stream.result(20).rstrip().rsplit("data: ", 1)[1])
    assert last["error"]["type"] == "server_error"
    for path in ("/health", "/ready"):
        answer = leaving.http.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
    answer = leaving.http.post(COMPLETION, json={"prompt": "a"})
    assert answer.status_code == 503
    leaving.signal(signal.SIGINT)
    leaving.wait_for_exit()


def _kill_core(parent: int) -> None:
    import os
    from pathlib import Path

    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    cores = [int(pid) for pid in children if b"starling_engine.core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(cores) == 1
    os.kill(cores[0], signal.SIGKILL)
