"""Every example is a manifest that the API server takes, `starling plan` understands and `starling up` runs."""

import subprocess

import httpx
import pytest

from tests.cli.commands.running import starling
from tests.cli.local.running import REPOSITORY
from tests.kube.apiserver import kubectl

NAMES = (
    "quickstart",
    "multi-group",
    "api-key",
    "pvc-weights",
    "tensor-parallel",
    "data-parallel",
    "elastic",
    "kv-tiers",
    "router",
    "gateway",
)


def test_there_are_no_others(examples):
    assert {file.stem for file in examples.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_api_server_takes_it(crd, examples, name):
    command = [*kubectl(crd), "apply", "--server-side", "--dry-run=server", "-f", str(examples / f"{name}.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"inferenceservice.serving.starling.dev/{name}" in done.stdout
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_planned(examples, name):
    answer = starling("plan", "-f", examples / f"{name}.yaml")
    assert answer.returncode == 0, answer.stderr
    assert "rank 0" in answer.stdout


@pytest.mark.whole  # `make demo` runs the first, and tests of groups have the layouts of the others
@pytest.mark.parametrize("name", ["quickstart", "tensor-parallel", "data-parallel"])
def test_it_runs_here(up, examples, name):
    running = up(examples / f"{name}.yaml")
    status = running.wait_until_ready()
    assert status["service"] == name
    assert running.ask()["model"] == name
    assert running.end() == 0
    assert not running.leftovers()


@pytest.mark.whole
def test_multi_group_runs_here(up, examples):
    running = up(examples / "multi-group.yaml")
    status = running.wait_until_ready("2/2")
    assert len(status["rows"]) == 2
    assert {running.ask(model="pydoc")["model"] for _ in range(4)} == {"pydoc"}
    assert running.end() == 0


def test_api_key_runs_here(up, examples):
    running = up(examples / "api-key.yaml")
    running.wait_until_ready()
    url = f"{running.status['url']}/models"
    assert httpx.get(url, trust_env=False).status_code == 401
    for key in ("change-me", "another-key-for-another-client"):
        assert httpx.get(url, headers={"Authorization": f"Bearer {key}"}, trust_env=False).status_code == 200


def test_pvc_weights_runs_here_with_a_folder_for_the_claim(up, examples):
    running = up(examples / "pvc-weights.yaml", "--map", f"pvc://weights={REPOSITORY / 'models'}")
    running.wait_until_ready()
    assert running.ask()["model"] == "pvc-weights"


def test_pvc_weights_without_a_folder_says_what_to_do(examples):
    answer = starling("up", "-f", examples / "pvc-weights.yaml")
    assert answer.returncode == 1
    assert "--map pvc://weights=FOLDER" in answer.stderr


def test_kv_tiers_keep_what_they_were_given_for_the_next_run(up, examples, tmp_path):
    """Of the 320 tokens of a prompt all but the last chunk: at least one token is always computed."""
    found = []
    for _ in range(2):
        running = up(examples / "kv-tiers.yaml", "--map", f"pvc://kv={tmp_path}")
        running.wait_until_ready()
        body = {"model": "kv-tiers", "prompt": list(range(100, 420)), "max_tokens": 1}
        answer = httpx.post(f"{running.status['url']}/completions", json=body, timeout=60, trust_env=False).json()
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert running.end() == 0
    assert found[0] == 0
    assert found[1] >= 256


def test_the_demo_shows_an_answer_and_stops():
    import sys

    done = subprocess.run([sys.executable, "examples/demo.py"], cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for words in ("os.path", "quickstart: ready at", "POD", "vllm:generation_tokens_total", "exit status 0", "kubectl apply -f"):
        assert words in done.stdout
