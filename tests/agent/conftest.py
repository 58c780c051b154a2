"""A live server: `starling serve` with the repository's own model, on a free port, as a user would start it."""

import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests import fork_server
from tests.naming_client import NamingClient

REPOSITORY = Path(__file__).parents[2]
MODEL = "models/starling-pydoc"
START_SECONDS = 240.0
SERVING = re.compile(r"serving (?P<name>[^,\n]+?)(, .*)? after .* at (?P<url>http://\S+)/v1")


class LiveServer:
    """A running `starling serve`. `errors` is its standard error up to now."""

    def __init__(self, process: fork_server.Fork, log: Path, api_key: str | None) -> None:
        self.process = process
        self.url = ""
        self._log = log
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = NamingClient(timeout=60.0, headers=headers)

    @property
    def errors(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_serving(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (found := SERVING.search(self.errors)):
            assert self.process.poll() is None, f"the server ended:\n{self.errors}"
            assert time.monotonic() < deadline, f"the server did not start:\n{self.errors}"
            time.sleep(0.05)
        self.url, self.http.model = found["url"], found["name"]
        self.http.base_url = httpx.URL(self.url)

    def wait_for_line(self, *words: str, seconds: float = 60.0) -> str:
        """Returns the first line of the log with all these words. It comes soon after the answer."""
        deadline = time.monotonic() + seconds
        while not (found := [line for line in self.errors.splitlines(True) if all(word in line for word in (*words, "\n"))]):
            assert time.monotonic() < deadline, f"waited {seconds} s for {words} in:\n{self.errors}"
            time.sleep(0.02)
        return found[0]

    def metric(self, name: str) -> float:
        """Returns the sum over all label sets of one metric."""
        text = self.http.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))

    def is_idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "starling:kv_blocks_used")
        return all(self.metric(name) == 0 for name in names)

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Waits until the engine has no request and every block is free, twice: counters may be a ping old."""
        deadline = time.monotonic() + seconds
        idle = 0
        while idle < 2:
            idle = idle + 1 if self.is_idle() else 0
            assert time.monotonic() < deadline, self.http.get("/metrics").text[:2000]
            time.sleep(0.3 if idle else 0.1)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_for_exit(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


StartServer = Callable[..., LiveServer]


@contextlib.contextmanager
def _servers(folder: Path) -> Iterator[StartServer]:
    with contextlib.ExitStack() as stack:

        def start(
            *flags: str, model: str = MODEL, api_key: str | None = None, environment: dict[str, str] | None = None
        ) -> LiveServer:
            log = folder / f"server-{time.monotonic_ns()}.log"
            command = ["serve", model, "--port", "0", "--num-threads=1", *flags]  # other tests have the rest of the CPUs
            process = fork_server.agent(command, log, REPOSITORY, **{"COLUMNS": "200", **(environment or {})})
            server = LiveServer(process, log, api_key)
            stack.callback(server.close)
            server.wait_until_serving()
            return server

        yield start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server for all tests that leave it unchanged."""
    with _servers(tmp_path_factory.mktemp("server")) as start:
        yield start("--served-model-name", "pydoc", "--served-model-name", "org/pydoc", "--kv-cache-memory-bytes", "256MiB")


@pytest.fixture(scope="module")
def idle_server(server: LiveServer) -> LiveServer:
    """The server when what other modules asked of it has ended."""
    server.wait_until_idle()
    return server


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers with other flags; all end with the module."""
    with _servers(tmp_path_factory.mktemp("servers")) as start:
        yield start


TOOLS_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call them as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% if enable_thinking is defined %}Think: {{ enable_thinking }}.{% endif %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


@pytest.fixture(scope="session")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a model whose template writes calls, and marks no reasoning; the flag says how it does."""
    folder = tmp_path_factory.mktemp("model") / "tools"
    shutil.copytree(REPOSITORY / MODEL, folder)
    for file in folder.glob("chat_template*"):
        file.unlink()
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    flags = ("--served-model-name=tools", "--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", "--reasoning-parser=qwen3")
    with _servers(tmp_path_factory.mktemp("tools-server")) as start:
        yield start(*flags, model=str(folder))


@pytest.fixture
def http(server: LiveServer) -> httpx.Client:
    return server.http
