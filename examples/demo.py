"""`make demo`: runs examples/quickstart.yaml on this machine, asks it something, shows the table and metrics, and stops cleanly.

usage: demo.py [MANIFEST]
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

QUICKSTART = "examples/quickstart.yaml"
QUESTION = "What does os.path.join do?"
METRICS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:kv_cache_usage",
)
READY_SECONDS = 180
COLUMNS = ("pod", "phase", "ready", "restarts", "port")
Status = dict[str, Any]


def main() -> int:
    manifest = sys.argv[1] if len(sys.argv) > 1 else QUICKSTART
    command = [str(Path(sys.executable).with_name("starling")), "up", "-f", manifest, "--port", "0", "-o", "json"]
    print(f"$ starling up -f {manifest}", flush=True)
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(READY_SECONDS, up.terminate)
    watchdog.start()
    try:
        lines = read_lines(up)
        status = wait_until_ready(lines)
        watchdog.cancel()
        chat(status["url"])
        show_table(status)
        show_metrics(status["url"])
    finally:
        watchdog.cancel()
        up.send_signal(signal.SIGTERM)
        up.communicate(timeout=60)
    print(f"\nThe service drained and ended with exit status {up.returncode}.\n")
    show_next(manifest, status["service"])
    return up.returncode


def read_lines(up: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert up.stdout is not None
    for line in up.stdout:
        yield json.loads(line)
    sys.exit(f"`starling up` ended, or was not ready after {READY_SECONDS} s: exit status {up.wait()}")


def wait_until_ready(lines: Iterator[dict[str, Any]]) -> Status:
    began, told = time.monotonic(), ""
    for line in lines:
        text = describe(line)
        if text and text != told:
            told = text
            print(f"  {time.monotonic() - began:4.1f} s  {text}", flush=True)
        if line["kind"] == "status" and line["ready"]:
            return line
    raise AssertionError("read_lines ends the program before")


def describe(line: dict[str, Any]) -> str:
    if line["kind"] == "event":
        return f"{line['reason']}: {line['message']}"
    if line["kind"] == "status":
        return "; ".join(f"{row['pod']} {row['phase']} {row['message']}".strip() for row in line["rows"])
    return ""


def chat(url: str) -> None:
    """Streams one answer to the terminal, token by token."""
    model = httpx.get(f"{url}/models", timeout=60, trust_env=False).raise_for_status().json()["data"][0]["id"]
    question = {"role": "user", "content": QUESTION}
    body = {"model": model, "messages": [question], "stream": True, "max_tokens": 120, "seed": 1}
    print(f"\n> {QUESTION}\n", flush=True)
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=120, trust_env=False) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
    print("\n")


def show_table(status: Status) -> None:
    print(f"{status['service']}: ready at {status['url']}, groups {status['groups']}")
    rows = [[name.upper() for name in COLUMNS], *([str(row[name]) for name in COLUMNS] for row in status["rows"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        print("  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def show_metrics(url: str) -> None:
    text = httpx.get(f"{url.removesuffix('/v1')}/metrics", trust_env=False).text
    for line in text.splitlines():
        if line.startswith(METRICS):
            print(line)


def show_next(manifest: str, service: str) -> None:
    print("On this machine, with a table that updates in place (`starling` is in .venv/bin):")
    print(f'  starling up -f {manifest}          and then   starling chat "{QUESTION}"')
    print("The same manifest on a cluster that has the operator (helm install starling charts/starling):")
    print(f"  kubectl apply -f {manifest}")
    print(f"  kubectl wait --for=condition=Ready infsvc/{service} --timeout=5m")
    print(f'  starling status {service}; starling chat {service} "{QUESTION}"')


if __name__ == "__main__":
    os.environ.setdefault("NO_COLOR", "1")
    sys.exit(main())
