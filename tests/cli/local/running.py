"""A running `starling up`, watched through its JSON lines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests import fork_server

REPOSITORY = Path(__file__).parents[3]
MODEL = "/opt/starling/models/starling-pydoc"
READY_SECONDS = 240.0


class RunningUp:
    """`events` are all lines so far; `status` is the last status line."""

    def __init__(self, manifest, folder, *flags):
        self.out, self.errors = folder / "out.jsonl", folder / "errors"
        self.folder = folder
        # Short, for sockets are made below it.
        self.tmp = tempfile.mkdtemp(prefix="up-", dir="/tmp")
        command = [sys.executable, "-m", "starling_cli.main", "up", "-f", str(manifest), "--port", "0", "-o", "json", *flags]
        environment = {**os.environ, "TMPDIR": self.tmp, **fork_server.environment()}
        with self.out.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=errors, env=environment)

    @property
    def lines(self):
        text = self.out.read_text(errors="replace")  # the last line may be half written
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]

    @property
    def status(self):
        found = [line for line in self.lines if line["kind"] == "status"]
        return found[-1] if found else {"ready": False, "rows": [], "message": "", "trouble": "", "reason": ""}

    def wait_for(self, holds, seconds=READY_SECONDS):
        """Waits until `holds(status)`."""
        deadline = time.monotonic() + seconds
        while not holds(status := self.status):
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, f"{status}\n{self.errors.read_text()}"
            time.sleep(0.05)
        return status

    def wait_for_status(self, holds, since):
        """Waits until one of the lines after the first `since` is a status that holds: it may be over by now."""
        self.wait_for(lambda _: any(line["kind"] == "status" and holds(line) for line in self.lines[since:]))

    def wait_until_ready(self, groups="1/1"):
        return self.wait_for(lambda status: status["ready"] and status["groups"] == groups and not status["trouble"])

    def wait_for_event(self, reason, seconds=READY_SECONDS):
        deadline = time.monotonic() + seconds
        while not any(line.get("reason") == reason for line in self.lines if line["kind"] == "event"):
            assert time.monotonic() < deadline, self.lines[-5:]
            time.sleep(0.05)

    def ask(self, tokens=4, **more):
        question = {"role": "user", "content": "What is a list?"}
        body = {"model": self.status["service"], "messages": [question], "max_tokens": tokens, **more}
        answer = httpx.post(f"{self.status['url']}/chat/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def agents(self):
        """Process ids of the agents."""
        return {row["pod"]: _child_named(self.process.pid, row["pod"]) for row in self.status["rows"]}

    def end(self, *signals, seconds=90.0):
        for number in signals or (signal.SIGTERM,):
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def leftovers(self):
        return list(Path(self.tmp).iterdir())

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.tmp)


def _child_named(parent, pod):
    """Returns the child that runs this pod."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"STARLING_POD_NAME={pod}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    return None
