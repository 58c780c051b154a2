"""Requests that Schemathesis makes of /openapi.json, and their answers, fit that page."""

import json
import subprocess

import pytest

from tests.agent.clients.environment import program

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
TINY = ("--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", "--max-model-len=256")
"""The context is short: a request that leaves out its limit may use all of it."""


@pytest.mark.parametrize("examples", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_answers_are_as_documented_whatever_is_sent(start_server, tmp_path, examples):
    schemathesis = program("python", "schemathesis")
    server = start_server(*TINY, model="models/starling-random-moe")
    page = server.http.get("/openapi.json").json()
    for schema in page["components"]["schemas"].values():
        if "model" in schema.get("required", ()):
            schema["properties"]["model"]["enum"] = [server.http.model]  # of random names each gets 404, and little else is tried
    (tmp_path / "openapi.json").write_text(json.dumps(page))
    command = [schemathesis, "run", "openapi.json", f"--url={server.url}", f"--checks={','.join(CHECKS)}"]
    flags = ("--phases=coverage,fuzzing", f"--max-examples={examples}", "--generation-deterministic", "--continue-on-failure")
    quiet = ("--no-color", "--warnings=off")
    ended = subprocess.run([*command, *flags, *quiet], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-5000:]
    server.wait_until_idle()
    assert [line for line in server.errors.splitlines() if '"level": "error"' in line] == []
