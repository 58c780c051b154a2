"""A server dies in the middle of a stream: the client gets the whole stream, as if another one had not had to go on with it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent.conftest import REPOSITORY, LiveServer, StartServer, start_server
from tests.agent.resumed import CHAT, COMPLETION, MESSAGES, TOKEN, joined
from tests.fork_server import pids_of
from tests.naming_client import NamingClient

__all__ = ["start_server"]
ASKED = [{"role": "user", "content": "How do I read a file?"}]
LONG = {"max_tokens": 300, "ignore_eos": True, "stream": True}
RESUMED, BROKEN = COUNTED = "router_resumed_streams_total", "router_broken_answers_total"
USAGE = {"stream_options": {"include_usage": True}}
Request = tuple[str, dict[str, Any]]
REQUESTS: dict[str, Request] = {
    "greedy chat": (CHAT, {"messages": ASKED, "temperature": 0, **LONG, **USAGE}),
    "sampled choices": (CHAT, {"messages": ASKED, "temperature": 1, "seed": 3, "n": 2, **LONG}),
    "completion": (COMPLETION, {"prompt": "import os\n", "temperature": 1, "seed": 4, "logprobs": 1, **LONG}),
    "messages": (MESSAGES, {"messages": ASKED, "temperature": 0, "max_tokens": 300, "stream": True,
                            "structured_outputs": {"regex": "[a-z ]{280,}"}}),
}  # fmt: skip


class Fleet:
    """A router and its servers, which all have one seed. `renew` makes it whole again."""

    def __init__(self, start: StartServer, folder: Path) -> None:
        self._token = folder / "token"
        self._token.write_text(TOKEN)
        self._start = start
        self.servers = [self.started(), self.started()]
        command = [
            sys.executable,
            "-m",
            "starling_cli.main",
            "router",
            "--port=0",
            "--load-weight=0",
            f"--router-token-file={self._token}",
        ]
        self._log = folder / "router.log"
        with self._log.open("wb") as errors:
            urls = [server.url for server in self.servers]
            self.process = subprocess.Popen([*command, *urls], cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=errors)
        self.client = NamingClient(base_url=self._url(), timeout=60)
        self.client.model = self.servers[0].http.model
        self._before: dict[str, float] = {}

    def started(self, port: int = 0) -> LiveServer:
        flags = ("--dtype=float32", "--seed=5", "--kv-cache-memory-bytes=64MiB", "--served-model-name=m", "--accept-seconds=0")
        return self._start(*flags, "--drain-seconds=0", f"--router-token-file={self._token}", f"--port={port}")

    def renew(self, *, unasked: bool) -> None:
        """Starts servers again that have ended, and those that had requests where `unasked`. Counts begin anew."""
        for at, server in enumerate(self.servers):
            if not healthy(server) or (unasked and server.metric("vllm:generation_tokens_total")):
                server.close()
                self.servers[at] = self.started(httpx.URL(server.url).port)
        self.wait_until_ready()
        self._before = {name: self.metric(name) for name in COUNTED}

    def count(self, name: str) -> float:
        return self.metric(name) - self._before[name]

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"starling:{name} ", f"starling:{name}{{")))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while self.metric("router_ready") < 2:
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def serving(self) -> LiveServer | None:
        """Returns the server that has all open requests; None where these have ended, as ten looks at what pings bring show."""
        for _ in range(10):
            if found := [server for server in self.servers if server.metric("vllm:num_requests_running")]:
                return found[0]
            time.sleep(0.2)
        return None

    def close(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def _url(self) -> str:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"at (http://\S+)/v1", self._log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)
        return found[1]


@pytest.fixture(scope="module")
def fleet(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(start_server, tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


def healthy(server: LiveServer) -> bool:
    try:
        return server.http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def kill(server: LiveServer) -> None:
    server.signal(signal.SIGKILL)


def kill_core(server: LiveServer) -> None:
    (core,) = pids_of(server.process.pid, "starling_engine.core")
    os.kill(core, signal.SIGKILL)


def end(server: LiveServer) -> None:
    server.signal(signal.SIGTERM)


def broken(
    fleet: Fleet,
    requests: Sequence[Request],
    hurt: Callable[[LiveServer], None],
    headers: Mapping[str, str],
    *,
    unasked: bool = False,
) -> list[bytes]:
    """Returns streams of one session, and so of one server, which is hurt in the middle of all.

    Where this process stood still, the server may have ended some before: then all is done again.
    """
    for _ in range(3):
        fleet.renew(unasked=unasked)
        streams = _hurt_streams(fleet, requests, hurt, headers)
        if fleet.count(RESUMED) + fleet.count(BROKEN) == len(requests):
            return streams
    raise AssertionError(f"{fleet.count(RESUMED)} resumed and {fleet.count(BROKEN)} broken of {len(requests)}")


def _hurt_streams(
    fleet: Fleet, requests: Sequence[Request], hurt: Callable[[LiveServer], None], headers: Mapping[str, str]
) -> list[bytes]:
    def hurt_serving() -> None:
        if (server := fleet.serving()) is not None:
            hurt(server)

    barrier = threading.Barrier(len(requests), action=hurt_serving)
    with ThreadPoolExecutor(len(requests)) as threads:
        given = [threads.submit(_stream, fleet, path, body, headers, barrier) for path, body in requests]
        return [each.result(120) for each in given]


def _stream(fleet: Fleet, path: str, body: dict[str, Any], headers: Mapping[str, str], barrier: threading.Barrier) -> bytes:
    data, waited = b"", False
    with fleet.client.stream("POST", path, json=body, headers={"x-session-id": "s", **headers}) as answer:
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-starling")]
        for chunk in answer.iter_bytes():
            data += chunk
            if not waited and len(data) > 4000:
                waited = barrier.wait(60) >= 0
    assert waited
    return data


def without_identity(found: dict[str, Any]) -> dict[str, Any]:
    """Leaves out id and time, of which a stream has one."""
    for event in [event for event in found["order"] if isinstance(event, dict)] + found.get("heads", []):
        del event["id"], event["created"]
    assert len(found.get("heads", [1])) == 1
    found.get("part message_start", {}).pop(".message.id", None)
    return found


def test_a_stream_without_a_seed(fleet: Fleet) -> None:
    body = {"messages": ASKED, "temperature": 1, **LONG}
    (data,) = broken(fleet, [(CHAT, body)], kill, {}, unasked=True)
    undisturbed = fleet.started().http.post(CHAT, json=body)  # its first request gets the seed that the first one had there
    assert without_identity(joined(data)) == without_identity(joined(undisturbed.content))


def test_a_server_is_killed(fleet: Fleet) -> None:
    streams = broken(fleet, [*REQUESTS.values()], kill, {})
    assert (fleet.count(RESUMED), fleet.count(BROKEN)) == (len(REQUESTS), 0)
    left = next(filter(healthy, fleet.servers))
    for data, (path, body) in zip(streams, REQUESTS.values(), strict=True):
        assert b": note" not in data and b"error" not in data
        undisturbed = left.http.post(path, json=body).content
        assert without_cached(without_identity(joined(data))) == without_cached(without_identity(joined(undisturbed)))


def without_cached(found: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what was cached: the prompts are, where they ran before."""
    for event in [event for event in found["order"] if isinstance(event, dict)]:
        del event["usage"]["prompt_tokens_details"]
    for part in found.values():
        if isinstance(part, dict):
            for name in [name for name in part if "cache" in name or name.endswith("input_tokens")]:
                del part[name]
    return found


@pytest.mark.parametrize("hurt", [end, kill_core])
def test_a_server_ends_or_its_engine_dies(fleet: Fleet, hurt: Callable[[LiveServer], None]) -> None:
    body = {"messages": ASKED, "temperature": 0, **LONG}
    (data,) = broken(fleet, [(CHAT, body)], hurt, {})
    whole = next(filter(healthy, fleet.servers)).http.post(CHAT, json=body)
    assert without_identity(joined(data)) == without_identity(joined(whole.content))
    assert fleet.count(RESUMED) == 1


def test_a_client_wants_no_resumption(fleet: Fleet) -> None:
    (data,) = broken(fleet, [(CHAT, {"messages": ASKED, **LONG})], kill, {"x-starling-resume": "never"})
    assert b'"code":"backend_lost"' in data.splitlines()[-2]
    assert (fleet.count(RESUMED), fleet.count(BROKEN)) == (0, 1)


def test_nobody_is_left(fleet: Fleet) -> None:
    def kill_all(_: LiveServer) -> None:
        for server in fleet.servers:
            kill(server)

    (data,) = broken(fleet, [(CHAT, {"messages": ASKED, **LONG})], kill_all, {})
    assert b'"code":"backend_lost"' in data.splitlines()[-2]
    assert fleet.count(BROKEN) == 1
