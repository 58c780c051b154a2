"""Findings of `starling check` that need no cluster."""

import json

import pytest
from starling_cli.checking.finding import bad, good, lines, note
from starling_cli.checking.machine import check_kernels
from starling_cli.checking.nodes import node_findings
from starling_engine import native

from tests.cli.commands.running import starling


def node(name="n", ready="True", unschedulable=False, **allocatable):
    status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": {"cpu": "4", "memory": "8Gi", **allocatable}}
    return {"metadata": {"name": name}, "spec": {"unschedulable": unschedulable}, "status": status}


def test_sections_marks_and_fixes():
    found = [good("one", "a", "1"), bad("one", "b", "2", "do it"), note("two", "c", "")]
    assert list(lines(found)) == ["one", "  √ a: 1", "  × b: 2", "      fix: do it", "", "two", "  - c"]


@pytest.mark.parametrize("nodes", [[], [node(ready="False")], [node(unschedulable=True)]])
def test_no_node_can_take_pods(nodes):
    (found,) = node_findings(nodes)
    assert found.state == "bad"


def test_devices_are_counted_over_nodes():
    gpus = {"nvidia.com/gpu": "4", "hugepages-1Gi": "0"}
    *_, devices = node_findings([node("a", **gpus), node("b", **gpus), node("c")])
    assert devices.detail == "CPUs, 8 nvidia.com/gpu"


def test_memory_is_shown_in_gib():
    assert [found.detail for found in node_findings([node(memory="16777216Ki")])][1] == "4 CPUs, 16.0 GiB for pods"


def test_without_a_cluster_this_machine_is_looked_at():
    answer = starling("check")
    assert "this machine" in answer.stdout
    assert "no cluster is configured" in answer.stdout
    assert "√ Python" in answer.stdout
    assert ("×" in answer.stdout) == (answer.returncode == 1)


def test_the_machine_as_json():
    found = json.loads(starling("check", "--machine", "-o", "json").stdout)
    assert {"section", "title", "state", "detail", "fix"} == set(found[0])
    assert {"Python", "memory", "CPUs", "native CPU kernels"} <= {entry["title"] for entry in found}


def test_why_there_are_no_native_kernels_is_said_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STARLING_NATIVE", "0")
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    found = {each.title: each for each in check_kernels()}["native CPU kernels"]
    assert (found.state, found.detail) == ("note", "off, torch is used instead: STARLING_NATIVE=0 (slower, but correct)")


def test_a_cluster_that_is_asked_for_and_not_there():
    answer = starling("check", "--kubeconfig", "/no/such/file")
    assert answer.returncode == 1
    assert "/no/such/file" in answer.stderr


def test_a_cluster_that_does_not_answer(tmp_path):
    file = tmp_path / "config"
    file.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]\n"
        "users: [{name: u, user: {}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n"
    )
    answer = starling("status", "--kubeconfig", file)
    assert answer.returncode == 1
    assert "cannot be reached" in answer.stderr
    assert "Traceback" not in answer.stderr
