"""`make demo`: serves a model on this machine, asks it something, shows the metrics, and stops cleanly.

usage: demo.py MODEL
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

QUESTION = "What does os.path.join do?"
METRICS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:kv_cache_usage",
)
READY_SECONDS = 180


def main() -> int:
    model = sys.argv[1]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("starling")), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    print("$", " ".join(["starling", *command[1:]]), flush=True)
    quiet = ["--log-level", "warning", "--accept-seconds", "0"]
    server = subprocess.Popen([*command, *quiet, "--kv-cache-memory-bytes", "256MiB", "--max-num-seqs", "32"])
    try:
        wait_until_ready(server, url)
        chat(url)
        show_metrics(url)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    print(f"\nThe server drained and ended with exit status {code}.")
    print(f"Go on:  starling serve {model}      then      starling chat     (both in .venv/bin)")
    return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit status {server.returncode}")
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    sys.exit(f"the server was not ready after {READY_SECONDS} s")


def chat(url: str) -> None:
    """Streams one answer to the terminal, token by token."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "max_tokens": 120, "seed": 1}
    body["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    print(f"\n> {QUESTION}\n", flush=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
    print("\n")


def show_metrics(url: str) -> None:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(METRICS):
            print(line)


if __name__ == "__main__":
    os.environ.setdefault("NO_COLOR", "1")
    sys.exit(main())
