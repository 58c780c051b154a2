"""`starling plan`: without a cluster, quick, and as strict as the API server."""

import json
import os
import resource
import subprocess
import sys

import pytest
import yaml

from tests.cli.commands.running import starling, starling_process


def body(name="chat", **spec):
    return {
        "apiVersion": "serving.starling.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"source": "hf://org/name"}, **spec},
    }


@pytest.fixture
def file(tmp_path):
    def write(*bodies, name="service.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump_all(bodies))
        return path

    return write


def test_the_tree_shows_children_groups_pods_and_ranks(file):
    answer = starling("plan", "-f", file(body(replicas=2)))
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0] == "InferenceService default/chat: hf://org/name"
    for kind in ("Secret", "ServiceAccount", "Service", "PodDisruptionBudget", "NetworkPolicy", "ControllerRevision", "ConfigMap"):
        assert any(f"── {kind} chat" in line for line in lines), kind
    assert any("2 groups of TP1 PP1 DP1: 1 node, 1 rank each" in line for line in lines)
    assert any("rank 0: dp 0, pp 0, tp 0, ep 0" in line for line in lines)


def test_a_layout_that_this_release_cannot_run_is_shown_and_refused(file):
    layout = {"tensor": 2, "pipeline": 2, "data": 2}
    answer = starling("plan", "-f", file(body(parallelism=layout, accelerators={"type": "amd.com/gpu", "perNode": 4})))
    assert answer.returncode == 1
    assert "spec.accelerators.type" in answer.stderr
    assert "rank 7: dp 1, pp 1, tp 1, ep 3" in answer.stdout
    assert "2 nodes, 8 ranks each" in answer.stdout


def test_many_groups_and_nodes_are_shown_as_a_number(file):
    answer = starling("plan", "-f", file(body(replicas=100)))
    assert "and 84 groups more" in answer.stdout


def test_a_namespace_is_that_of_manifests_without_one(file):
    placed = body("placed")
    placed["metadata"]["namespace"] = "blue"
    lines = starling("plan", "-f", file(body(), placed), "-n", "prod").stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("Inf")] == [
        "InferenceService prod/chat",
        "InferenceService blue/placed",
    ]


def test_several_documents(file):
    other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    answer = starling("plan", "-f", file(body("one"), other, body("two")))
    assert answer.returncode == 0, answer.stderr
    assert [line for line in answer.stdout.splitlines() if line.startswith("InferenceService")] == [
        "InferenceService default/one: hf://org/name",
        "InferenceService default/two: hf://org/name",
    ]


def test_standard_input():
    assert starling("plan", "-f", "-", input=yaml.safe_dump(body())).returncode == 0


def test_manifests_as_yaml_and_json(file):
    path = file(body(replicas=3))
    objects = list(yaml.safe_load_all(starling("plan", "-f", path, "-o", "yaml").stdout))
    items = json.loads(starling("plan", "-f", path, "-o", "json").stdout)["items"]
    assert objects == items
    assert [item["kind"] for item in items].count("StatefulSet") == 3
    assert not any("uid" in item["metadata"] for item in items)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"replicas": -1}, ["spec.replicas"]),
        ({"replicass": 1}, ["spec.replicass"]),
        ({"model": {"source": "s3://x"}}, ["spec.model.source", "hf://"]),
        ({"model": {}}, ["spec.model.source"]),
        ({"engine": {"extraArgs": {"nope": 1}}}, ["spec.engine.extraArgs.nope"]),
        ({"engine": {"blockSize": 7}}, ["spec.engine.blockSize"]),
        ({"replicas": -1, "drain": {"seconds": -1}}, ["spec.replicas", "spec.drain.seconds"]),
    ],
)
def test_errors_name_the_fields(file, spec, words):
    answer = starling("plan", "-f", file(body(**spec)))
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    for word in words:
        assert word in answer.stderr


def header(version="v1alpha1", name="a"):
    return f"kind: InferenceService\napiVersion: serving.starling.dev/{version}\nmetadata: {{name: {name}}}\n"


SPEC = "spec: {model: {source: hf://a/b}}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not YAML"),
        ("- 1", "mapping"),
        ("kind: Pod", "no document of kind InferenceService"),
        ("", "no document of kind InferenceService"),
        (header("v9") + SPEC, "v9"),
        (header(name="A_b") + SPEC, "A_b"),
        (header(name="a" * 41) + SPEC, "metadata.name"),
        (header(), "spec"),
        (header() + "spec: 7", "spec"),
        ("kind: InferenceService\napiVersion: serving.starling.dev/v1alpha1\nmetadata: 7\n" + SPEC, "metadata.name"),
        ("kind: InferenceService\n" + SPEC, "apiVersion"),
    ],
)
def test_files_that_cannot_be_planned(tmp_path, text, words):
    path = tmp_path / "service.yaml"
    path.write_text(text)
    answer = starling("plan", "-f", path)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    assert words in answer.stderr


def test_a_file_that_is_not_there():
    answer = starling("plan", "-f", "/no/such/file.yaml")
    assert answer.returncode == 1
    assert "/no/such/file.yaml" in answer.stderr


def test_it_is_quick(file, tmp_path):
    """Some four tenths of a second, a third of them for the libraries that it is made of. These are the measure: processors differ.

    In processor time, which depends less on what else a machine does, and with compiled modules, as installed.
    """
    path = file(body(replicas=2))
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
    libraries = [sys.executable, "-c", "import msgspec, pydantic, rich.console, typer, yaml"]

    def turn():
        loading = _seconds(lambda: subprocess.run(libraries, env={**os.environ, **compiled}))
        return loading, _seconds(lambda: starling_process("plan", "-f", path, **compiled))

    loading, planning = (min(seconds) for seconds in zip(*[turn() for _ in range(5)], strict=True))
    assert planning < 5 * loading


def _seconds(run):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run().returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _elastic(size, unit="expert", most=8, pipeline=1, **more):
    return {"parallelism": {unit: size, "pipeline": pipeline, "elastic": {"min": 1, "max": most}}, **more}


def test_the_tree_shows_the_sizes_that_a_live_group_may_take(file):
    spec = {"parallelism": {"tensor": 2, "expert": 4, "elastic": {"min": 4, "max": 12}}, "accelerators": {"perNode": 4}}
    answer = starling("plan", "-f", file(body(**spec)))
    assert answer.returncode == 0, answer.stderr
    assert "elastic: expert may be 4, 8, 12 without a rolling update" in answer.stdout
    assert "── ParallelismScale chat" in answer.stdout


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {}, ["nothing changes"]),
        ({"replicas": 1}, {}, ["nothing changes"]),
        ({}, {"replicas": 3}, ["scale: from 1 to 3 groups", "spec.replicas: 1 -> 3"]),
        ({"replicas": 2}, {"replicas": 2, "suspend": True}, ["scale: from 2 to 0 groups"]),
        ({}, {"engine": {"maxSequences": 7}}, ["rolling update: 1 group of a new revision", "1 more and 0 fewer"]),
        (
            {"replicas": 4},
            {"replicas": 4, "drain": {"seconds": 5}, "rollout": {"maxSurge": 0, "maxUnavailable": 2}},
            ["rolling update: 4 groups of a new revision", "0 more and 2 fewer than 4"],
        ),
        ({}, {"replicas": 2, "model": {"source": "hf://org/other"}}, ["rolling update", "scale: from 1 to 2"]),
        ({}, {"endpoint": {"port": 8080}}, ["in place: no pod restarts", "spec.endpoint.port: 80 -> 8080"]),
        ({}, {"recovery": {"restartBudget": 1}}, ["in place: no pod restarts"]),
        (_elastic(2), _elastic(4), ["scale operation: the groups go EP 2 -> 4 (2 -> 4 pods each)", "parallelism.expert: 2 -> 4"]),
        (_elastic(4, "data"), _elastic(1, "data"), ["scale operation: the groups go DP 4 -> 1 (4 -> 1 pods each)"]),
        (_elastic(2), _elastic(4, replicas=3), ["scale: from 1 to 3 groups", "scale operation: the groups go EP 2 -> 4"]),
        (_elastic(2), _elastic(2, most=16), ["rolling update", "parallelism.elastic.max: 8 -> 16"]),
        (_elastic(2), {"parallelism": {"expert": 2}}, ["rolling update"]),
        (_elastic(2), _elastic(2, pipeline=2), ["rolling update"]),
        ({"parallelism": {"data": 2}}, {"parallelism": {"data": 4}}, ["rolling update"]),
        (_elastic(2, replicas=0), _elastic(4, replicas=0), ["in place: no pod restarts"]),
        ({"replicas": 0}, {"replicas": 0, "engine": {"maxSequences": 7}}, ["a new revision, without groups to replace"]),
    ],
)
def test_what_an_edit_does(file, before, after, words):
    answer = starling("plan", "-f", file(body(**after)), "--diff", file(body(**before), name="old.yaml"))
    assert answer.returncode == 0, answer.stderr
    for word in words:
        assert word in answer.stdout


def test_services_that_come_and_go(file):
    new, old = file(body("one"), body("two")), file(body("one"), body("three"), name="old.yaml")
    answer = starling("plan", "-f", new, "--diff", old)
    assert "two: new: 1 group" in answer.stdout
    assert "three: not in the new file" in answer.stdout
    assert len(json.loads(starling("plan", "-f", new, "--diff", old, "-o", "json").stdout)) == 3
    assert len(yaml.safe_load(starling("plan", "-f", new, "--diff", old, "-o", "yaml").stdout)) == 3
