"""`starling up` with real agents: edits, crashes, bad manifests, signals."""

import os
import signal
import time

import httpx
import pytest
import yaml

from tests.agent.node.hub import running_hub
from tests.cli.local.running import MODEL, REPOSITORY


def write(file, **spec):
    body = {
        "apiVersion": "serving.starling.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "local"},
        "spec": {
            "model": {"source": f"file://{MODEL}"},
            "engine": {"kvMemory": "64Mi", "maxSequences": 8, "extraArgs": {"num_threads": 1}},
            "drain": {"acceptSeconds": 0, "seconds": 60},
            **spec,
        },
    }
    file.write_text(yaml.safe_dump(body))
    return file


@pytest.fixture
def manifest(tmp_path):
    return write(tmp_path / "service.yaml")


def stream(running, tokens):
    body = {"model": running.status["service"], "prompt": "A list is", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return httpx.stream("POST", f"{running.status['url']}/completions", json=body, timeout=60, trust_env=False)


def test_edits_are_picked_up_and_a_crash_heals(up, manifest):
    running = up(manifest)
    first = running.wait_until_ready()["rows"][0]["pod"]
    assert running.ask()["model"] == "local"

    write(manifest, replicas=2)
    rows = running.wait_until_ready("2/2")["rows"]
    assert [row["ready"] for row in rows] == [True, True]
    assert first in [row["pod"] for row in rows], "a scale replaces nothing"

    before = len(running.lines)
    os.kill(running.agents()[first], signal.SIGKILL)
    running.wait_for_status(lambda status: not status["ready"], since=before)
    assert running.ask(), "the other group goes on"
    rows = running.wait_until_ready("2/2")["rows"]
    assert [row["restarts"] for row in rows if row["pod"] == first] == [1]

    assert running.end() == 0
    assert not running.leftovers()


def test_another_model_name_rolls_without_a_gap(up, manifest):
    """Clients may still say the old name meanwhile, so it stays beside the new one."""
    running = up(manifest)
    before = running.wait_until_ready()["rows"][0]["pod"]

    write(manifest, model={"source": f"file://{MODEL}", "servedNames": ["local", "renamed"]})
    running.wait_for(lambda status: len(status["rows"]) == 2)
    while before in [row["pod"] for row in running.status["rows"]]:
        assert running.ask()["model"] == "local"
        time.sleep(0.1)
    running.wait_until_ready()
    assert running.ask(model="renamed")["model"] == "renamed"


def test_a_file_that_cannot_be_used_stops_nothing(up, manifest):
    running = up(manifest)
    running.wait_until_ready()
    for text, trouble in ((": : :", "is not YAML"), ("kind: ConfigMap", "; it has: ConfigMap"), ("", "no document of kind")):
        manifest.write_text(text)
        running.wait_for(lambda status, trouble=trouble: trouble in status["trouble"])
    write(manifest, replicas=-1)
    running.wait_for(lambda status: "replicas" in status["trouble"])
    write(manifest, model={"source": "pvc://weights/x"})
    running.wait_for(lambda status: "--map pvc://weights=FOLDER" in status["trouble"])
    assert running.ask()
    write(manifest)
    running.wait_until_ready()


def test_a_second_signal_ends_at_once(up, manifest):
    running = up(write(manifest, drain={"acceptSeconds": 0, "seconds": 120}))
    running.wait_until_ready()
    agent = next(iter(running.agents().values()))
    with stream(running, tokens=4000) as response:
        next(response.iter_lines())
        running.process.send_signal(signal.SIGTERM)
        running.wait_for(lambda status: status["stopping"])
        began = time.monotonic()
        assert running.end(signal.SIGINT) == 1
    assert time.monotonic() - began < 25
    with pytest.raises(ProcessLookupError):
        os.kill(agent, 0)
    assert not running.leftovers()


def test_an_open_stream_is_finished_before_the_end(up, manifest):
    running = up(manifest)
    running.wait_until_ready()
    with stream(running, tokens=200) as response:
        lines = response.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert running.process.wait(90) == 0


def test_replicas_load_one_commit_though_the_repository_moves(up, manifest, tmp_path, monkeypatch):
    write(manifest, model={"source": "hf://org/name", "cache": {"hostPath": str(tmp_path / "weights")}}, replicas=2)
    with running_hub(REPOSITORY / "models" / "starling-pydoc") as hub:
        hub.moves = True
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("NO_PROXY", "*")
        running = up(manifest)
        running.wait_until_ready("2/2")
        loaded = list((tmp_path / "weights").glob("hub/models--org--name/snapshots/*"))
        assert len(loaded) == 1 and loaded[0].name in hub.commits
