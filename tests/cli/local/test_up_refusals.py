"""Refusals of `starling up` before it starts anything."""

import socket

import pytest
import yaml

from tests.cli.commands.running import REPOSITORY, starling

MODEL = {"source": f"file://{REPOSITORY}/models/starling-pydoc"}


@pytest.fixture
def file(tmp_path):
    def write(*names, **spec):
        head = {"apiVersion": "serving.starling.dev/v1alpha1", "kind": "InferenceService"}
        bodies = [{**head, "metadata": {"name": name}, "spec": {"model": MODEL, **spec}} for name in names or ("a",)]
        path = tmp_path / "service.yaml"
        path.write_text(yaml.safe_dump_all(bodies))
        return path

    return write


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"model": {"source": "pvc://weights/x"}}, "--map pvc://weights=FOLDER"),
        ({"model": {"source": "file:///no/such/model"}}, "--map /no/such/model=FOLDER"),
        ({"kvCache": {"tiers": {"filesystem": {"claim": "kv", "bytes": "1Gi"}}}}, "--map pvc://kv=FOLDER"),
        ({"engine": {"extraArgs": {"nope": 1}}}, "spec.engine.extraArgs.nope"),
        ({"accelerators": {"type": "amd.com/gpu"}}, "spec.accelerators.type"),
        ({"parallelism": {"tensor": 3}}, "spec.parallelism.tensor: 3 ranks cannot share this model"),
        ({"model": {**MODEL, "maxLength": 1 << 20}}, "spec.model.maxLength: the model's longest sequence is"),
        ({"model": {"source": f"file://{REPOSITORY}/docs"}}, "docs holds no config.json"),
    ],
)
def test_specs(file, spec, words):
    answer = starling("up", "-f", file(**spec))
    assert answer.returncode == 1
    assert words in answer.stderr
    assert answer.stderr.splitlines()[-1].startswith("fix: ")


@pytest.mark.parametrize(("names", "flags", "words"), [(("a", "b"), [], "--name"), (("a", "b"), ["--name", "c"], "it has: a, b")])
def test_which_service(file, names, flags, words):
    answer = starling("up", "-f", file(*names), *flags)
    assert answer.returncode == 1
    assert words in answer.stderr


def test_a_mapping_of_the_wrong_form(file):
    assert "no mapping" in starling("up", "-f", file(), "--map", "here").stderr


def test_a_port_in_use_is_reported_before_an_agent_starts(file):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        answer = starling("up", "-f", file(), "--port", port, "-o", "json")
    assert answer.returncode == 1
    assert f"127.0.0.1:{port} cannot be listened on" in answer.stderr
    assert answer.stdout == ""


def test_a_file_that_is_not_there():
    answer = starling("up", "-f", "/no/such/file.yaml")
    assert answer.returncode == 1
    assert "/no/such/file.yaml" in answer.stderr
