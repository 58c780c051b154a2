"""Real nodes: `starling agent` with a configuration of its own, on free ports, as a pod would start it."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starling_agent.contract.report import Report

from tests import fork_server
from tests.ports import free_port

REPOSITORY = Path(__file__).parents[3]
MODEL = REPOSITORY / "models" / "starling-pydoc"
TOKEN = "the-admin-token"
SECONDS = 150.0


def configuration(folder: Path, **changes: Any) -> dict[str, Any]:
    """Makes a valid configuration on free ports; `changes` replace parts of it or fields of them."""
    (folder / "token").write_text(TOKEN + "\n")
    config: dict[str, Any] = {
        "namespace": "default",
        "service": "chat",
        "revision": "1a2b3c4",
        "model": {"source": MODEL.as_uri(), "cache_dir": str(folder / "cache"), "served_names": ["pydoc"]},
        "engine": {"kv_cache_memory_bytes": 64 << 20, "num_threads": 1},
        "endpoint": {"host": "127.0.0.1", "port": free_port()},
        "admin": {"host": "127.0.0.1", "port": free_port(), "token_file": str(folder / "token")},
        "drain": {"accept_seconds": 0.5, "seconds": 60},
    }
    for name, change in changes.items():
        config[name] = {**config[name], **change} if isinstance(change, dict) and name in config else change
    return config


class Agent:
    """A running `starling agent`."""

    def __init__(self, process: fork_server.Fork, folder: Path, config: dict[str, Any]) -> None:
        self.process = process
        self.config = config
        self.folder = folder
        scheme = "https" if "tls_cert_file" in config["endpoint"] else "http"
        self.url = f"{scheme}://127.0.0.1:{config['endpoint']['port']}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0, verify=False, trust_env=False)
        self.admin = httpx.Client(
            base_url=f"http://127.0.0.1:{config['admin']['port']}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=70.0,
            trust_env=False,
        )

    @property
    def errors(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def report(self, after: int = -1, wait: float = 0.0) -> Report:
        answer = self.admin.get("/admin/report", params={"after": after, "wait": wait})
        assert answer.status_code == 200, answer.text
        return Report.model_validate_json(answer.content)

    def reports(self, enough: Callable[[Report], bool], seconds: float = SECONDS) -> list[Report]:
        """Returns all reports of a long poll from now until `enough` holds."""
        seen = [self.first_report()]
        deadline = time.monotonic() + seconds
        while not enough(seen[-1]):
            assert time.monotonic() < deadline, f"{seen[-1]}\n{self.errors}"
            report = self.report(seen[-1].version, wait=2.0)
            if report.version != seen[-1].version:
                seen.append(report)
        return seen

    def until(self, phase: str) -> list[Report]:
        return self.reports(lambda report: report.phase == phase)

    def first_report(self) -> Report:
        """Waits until the process has started: on a busy machine that takes a while."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return self.report()
            except httpx.ConnectError:
                assert self.process.poll() is None, self.errors
                assert time.monotonic() < deadline, self.errors
                time.sleep(0.02)

    def core_pid(self) -> int:
        (pid,) = fork_server.pids_of(self.process.pid, "starling_engine.core")
        return pid

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 120.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def close(self) -> None:
        self.http.close()
        self.admin.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


StartAgent = Callable[..., Agent]


@contextlib.contextmanager
def _agents(folder: Path) -> Iterator[StartAgent]:
    with contextlib.ExitStack() as stack:

        def start(
            *, text: str | None = None, pod: str = "chat-1a2b3c4-0-0", environment: dict[str, str] | None = None, **changes: Any
        ) -> Agent:
            config = configuration(folder, **changes)
            run_folder = folder / f"agent-{time.monotonic_ns()}"
            run_folder.mkdir()
            (run_folder / "agent.json").write_text(json.dumps(config) if text is None else text)
            command = ["agent", "--config", str(run_folder / "agent.json")]
            added = {"STARLING_POD_NAME": pod, **(environment or {})}
            agent = Agent(fork_server.agent(command, run_folder / "log", run_folder, **added), run_folder, config)
            stack.callback(agent.close)
            return agent

        yield start


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent that serves, for all tests that leave it unchanged."""
    with _agents(tmp_path_factory.mktemp("agent")) as start:
        running = start()
        running.until("serving")
        yield running


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[StartAgent]:
    with _agents(tmp_path) as start:
        yield start


class StreamReader(threading.Thread):
    """Reads one stream to its end. `begun` is set with its first bytes."""

    def __init__(self, agent: Agent, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.text = ""
        self._agent = agent
        self._body = {"model": "pydoc", "prompt": "import", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        with self._agent.http.stream("POST", "/v1/completions", json=self._body) as answer:
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()

    def result(self, seconds: float = 60.0) -> str:
        self.join(seconds)
        assert not self.is_alive()
        return self.text

    def last_event(self, seconds: float = 60.0) -> Any:
        return json.loads(self.result(seconds).rstrip().rpartition("\n")[2].removeprefix("data: "))


def complete(agent: Agent) -> httpx.Response:
    return agent.http.post("/v1/completions", json={"model": "pydoc", "prompt": "import", "max_tokens": 2})
