"""`starling up` with `spec.router`: one router in front of the groups, as on a cluster."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from tests.cli.local.running import REPOSITORY

LONG = {"prompt": "import os\n", "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 4, "stream": True}


@pytest.fixture
def edit(tmp_path):
    """Writes the example with other fields of its spec, and returns the file."""

    def edit(**changes):
        manifest = yaml.safe_load((REPOSITORY / "examples/router.yaml").read_text())
        spec = manifest["spec"]
        spec["model"]["dtype"] = "float32"  # streams that go on are equal
        spec["drain"] = {"acceptSeconds": 0}
        spec |= changes
        file = tmp_path / "service.yaml"
        file.write_text(yaml.safe_dump(manifest))
        return file

    return edit


def routers(status):
    return [row for row in status["rows"] if row["pod"].startswith("router-router-")]


def groups(status):
    return [row for row in status["rows"] if not row["pod"].startswith("router-router-")]


def texts(response, after=lambda: None):
    """Returns the tokens of a stream; `after` is called behind its first."""
    found = []
    for line in response.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            found.append(event["choices"][0]["text"])
            if len(found) == 1:
                after()
    assert line == "" or line == "data: [DONE]"
    return "".join(found)


def completion(running):
    body, headers = {"model": "router", **LONG}, {"X-Starling-Explain": "1"}
    return httpx.stream("POST", f"{running.status['url']}/completions", json=body, headers=headers, timeout=60, trust_env=False)


def asked_directly(status):
    """Returns the status of an agent's answer to a client that comes past the router."""
    return httpx.get(f"http://127.0.0.1:{groups(status)[0]['port']}/v1/models", trust_env=False).status_code


def router_process(running):
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    return next(int(child) for child in children if b"--backends-file" in Path(f"/proc/{child}/cmdline").read_bytes())


def metric(running, name):
    lines = httpx.get(f"{running.status['url'].removesuffix('/v1')}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"starling:{name}"))


def test_streams_go_on_and_routers_follow_the_file(up, edit):
    running = up(edit(router={"replicas": 3, "policy": {"load": 0}}))
    status = running.wait_until_ready("2/2")
    assert "not used here: spec.router.replicas" in next(line["message"] for line in running.lines if line["kind"] == "note")
    (router,) = routers(status)
    assert router["ready"] and len(groups(status)) == 2

    assert asked_directly(status) == 403
    with completion(running) as undisturbed:
        wanted = texts(undisturbed)
    with completion(running) as resumed:
        serving = next(row["pod"] for row in groups(status) if f":{row['port']};" in resumed.headers["x-starling-route"])
        agent = running.agents()[serving]
        assert texts(resumed, after=lambda: os.kill(agent, signal.SIGKILL)) == wanted
    assert metric(running, "router_resumed_streams_total") == 1

    before = len(running.lines)
    os.kill(router_process(running), signal.SIGKILL)
    running.wait_for_status(lambda status: not routers(status)[0]["ready"], since=before)
    status = running.wait_until_ready("2/2")
    assert [row["restarts"] for row in routers(status)] == [1]
    assert running.ask()

    edit(replicas=1, router={"hold": {"requests": 7}})
    running.wait_for(lambda status: [row["pod"] for row in routers(status)] == ["router-router-2"])
    assert running.ask()
    edit(replicas=1, router=None)
    running.wait_for(lambda status: len(status["rows"]) == 1 and asked_directly(status) == 200)
    assert running.ask()

    assert running.end() == 0
    assert not running.leftovers()


def test_routers_know_the_service_while_no_group_serves(up, edit):
    running = up(edit(replicas=0, router={"hold": {"requests": 0}}))
    running.wait_for(lambda status: [row["ready"] for row in routers(status)] == [True])
    with httpx.Client(base_url=running.status["url"], trust_env=False) as client:
        running.wait_for(lambda _: client.get("/models").status_code == 200)
        assert [model["id"] for model in client.get("/models").json()["data"]] == ["router"]
        refused = client.post("/completions", json={"model": "router", "prompt": "import"})
    assert (refused.status_code, refused.headers["x-starling-phase"]) == (503, "ScaledToZero")
    assert "ScaledToZero: " in refused.json()["error"]["message"]
    assert running.end() == 0
