"""`starling status`, `scale`, `check`, `chat` and `support-bundle` on a real API server."""

import json
import tarfile

import pytest

from tests.cli.commands.conftest import OneNamespace

SPEC = {"model": {"source": "hf://org/name"}, "replicas": 2}
SERVING = {
    "observedGeneration": 1,
    "replicas": 2,
    "readyReplicas": 2,
    "topology": "TP1 PP1 DP1",
    "url": "http://chat.team.svc/v1",
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Ready",
            "message": "2 of 2 groups serve",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
    "groups": [{"name": "chat-aaaaaaa-0", "revision": "aaaaaaa", "index": 0, "ready": True}],
}
TOKEN = "dG9wIHNlY3JldA=="


def service(name="chat", **spec):
    return {
        "apiVersion": "serving.starling.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {**SPEC, **spec},
    }


@pytest.fixture
def served(cluster):
    """A namespace with one service that an operator has seen."""
    cluster.apply(service())
    cluster.set_status("infsvc", "chat", SERVING)
    return cluster


def test_a_table_of_all(served):
    served.apply(service("other"))
    answer = served.starling("status")
    assert answer.returncode == 0, answer.stderr
    head, chat, other = (line.split() for line in answer.stdout.splitlines())
    assert head == ["NAME", "READY", "REASON", "REPLICAS", "TOPOLOGY", "URL", "AGE"]
    assert chat[:-1] == ["chat", "True", "Ready", "2/2", "TP1", "PP1", "DP1", "http://chat.team.svc/v1"]
    assert other[:4] == ["other", "Unknown", "Pending", "0/2"]


def test_what_an_edit_would_do_to_the_cluster(served, tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text(json.dumps(service(replicas=3)))
    answer = served.starling("plan", "-f", file, "--diff", "cluster")
    assert answer.returncode == 0, answer.stderr
    assert "chat: scale: from 2 to 3 groups" in answer.stdout
    file.write_text(json.dumps(service("other")))
    assert "other: new: 2 groups" in served.starling("plan", "-f", file, "--diff", "cluster").stdout


def test_one_in_detail(served):
    answer = served.starling("status", "chat")
    assert answer.returncode == 0, answer.stderr
    for words in ("2 of 2 serve", "http://chat.team.svc/v1", "chat-aaaaaaa-0", "CONDITION", "hf://org/name"):
        assert words in answer.stdout


def test_one_that_is_not_ready_ends_with_1(cluster):
    cluster.apply(service())
    answer = cluster.starling("status", "chat")
    assert answer.returncode == 1
    assert "no operator has looked at this service yet" in answer.stdout


def test_status_as_json(served):
    assert json.loads(served.starling("status", "chat", "-o", "json").stdout)["status"]["readyReplicas"] == 2
    assert [item["metadata"]["name"] for item in json.loads(served.starling("status", "-o", "json").stdout)] == ["chat"]


def test_an_empty_namespace(cluster):
    answer = cluster.starling("status")
    assert answer.returncode == 0
    assert answer.stdout == f"no InferenceService in namespace {cluster.name}\n"


@pytest.mark.parametrize("command", [["status", "nope"], ["scale", "nope", "--replicas", "1"], ["chat", "nope", "Hi there?"]])
def test_a_name_that_is_not_there(served, command):
    answer = served.starling(*command)
    assert answer.returncode == 1
    assert "has no InferenceService 'nope'; it has: chat" in answer.stderr


def test_scaling(served):
    answer = served.starling("scale", "chat", "--replicas", "5")
    assert answer.returncode == 0, answer.stderr
    assert "from 2 to 5 groups" in answer.stdout
    assert served.get("infsvc", "chat")["spec"]["replicas"] == 5
    assert "has 5 groups as before" in served.starling("scale", "chat", "--replicas", "5").stdout


def test_chat_says_why_no_pod_answers(served):
    answer = served.starling("chat", "chat", "Hi there?")
    assert answer.returncode == 1
    assert "no pod of InferenceService 'chat' is ready" in answer.stderr


def test_check_finds_what_is_missing(cluster):
    found = json.loads(cluster.starling("check", "-o", "json").stdout)
    states = {(entry["section"], entry["title"]): entry["state"] for entry in found}
    assert states["cluster", "Kubernetes"] == "ok"
    assert states["CRD", "inferenceservices.serving.starling.dev"] == "ok"
    assert states["CRD", "schema"] == "ok"
    assert states["rights", "create inferenceservices"] == "ok"
    assert states["operator", "deployment"] == "bad"
    assert states["nodes", "ready and schedulable"] == "bad"
    assert all(entry["fix"] for entry in found if entry["state"] == "bad")


def test_check_before_the_installation(cluster):
    answer = cluster.starling("check", "--pre")
    assert "rights to install" in answer.stdout
    assert "CRD\n" not in answer.stdout


def test_check_without_rights(cluster):
    """A person who may do nothing is told so, check by check."""
    token = cluster.kubectl("create", "token", "default").strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    file = cluster.kubeconfig.parent / f"{cluster.name}.json"
    file.write_text(json.dumps(config))
    nobody = OneNamespace(file, cluster.name)
    answer = nobody.starling("check")
    assert answer.returncode == 1
    assert "× create inferenceservices" in answer.stdout
    assert "could not look" in answer.stdout
    assert "role `edit`" in nobody.starling("status").stderr


def test_the_bundle_has_everything_but_secrets(served, tmp_path):
    uid = served.get("infsvc", "chat")["metadata"]["uid"]
    owner = {"apiVersion": "serving.starling.dev/v1alpha1", "kind": "InferenceService", "name": "chat", "uid": uid}
    meta = {"ownerReferences": [owner], "labels": {"serving.starling.dev/service": "chat"}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {**meta, "name": "chat-token-1"}, "data": {"token": TOKEN}}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**meta, "name": "chat-a"}, "data": {"agent.json": "{}"}}
    stranger = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "strange"}, "data": {}}
    container = {"name": "agent", "image": "none", "env": [{"name": "HF_TOKEN", "value": TOKEN}]}
    volumes = [{"name": "admin", "secret": {"secretName": "chat-token-1"}}]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**meta, "name": "chat-a-0-0"},
        "spec": {"containers": [container], "volumes": volumes},
    }
    served.apply(secret, config, stranger, pod)

    file = tmp_path / "bundle.tar.gz"
    answer = served.starling("support-bundle", "chat", "--file", file)
    assert answer.returncode == 0, answer.stderr
    with tarfile.open(file) as archive:
        content = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}
    assert {
        "bundle/README.txt",
        "bundle/inferenceservice.yaml",
        "bundle/versions.yaml",
        "bundle/events.yaml",
        "bundle/children/Secret-chat-token-1.yaml",
        "bundle/children/ConfigMap-chat-a.yaml",
        "bundle/pods/chat-a-0-0.yaml",
    } <= set(content)
    assert "bundle/children/ConfigMap-strange.yaml" not in content
    assert not [name for name, text in content.items() if TOKEN in text or "top secret" in text]
    assert "missing: reports/chat-a-0-0.json: the agent gave no report" in content["bundle/README.txt"]
    assert file.stat().st_mode & 0o077 == 0

    again = served.starling("support-bundle", "chat", "--file", file)
    assert again.returncode == 1
    assert "exists" in again.stderr
