"""A pod's body, read."""

from typing import Any

import pytest
from starling_operator.pods import read_pod


def body(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    labels = {f"serving.starling.dev/{key}": value for key, value in {"service": "c", "group": "c-r-0", "revision": "r"}.items()}
    base = {"name": "c-r-0-1", "namespace": "n", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": {**base, **metadata}, "spec": {"nodeName": "n1"}, "status": status or {}}


def container(state: dict[str, Any], last: dict[str, Any] | None = None, restarts: int = 0) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "agent", "state": state, "lastState": last or {}, "restartCount": restarts}]}


def test_identity() -> None:
    pod = read_pod(body({"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}))
    assert (pod.group, pod.revision, pod.number, pod.host, pod.scheduled) == ("c-r-0", "r", 1, "n1", True)
    assert (pod.address, pod.ready, pod.phase, pod.deleted_at, pod.waiting) == ("10.0.0.1", True, "Running", None, "")
    assert pod.created_at == 1767225600.0


@pytest.mark.parametrize(
    ("status", "waiting"),
    [
        (container({"waiting": {"reason": "ContainerCreating"}}), ""),
        (
            container({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling x"}}),
            "ImagePullBackOff: Back-off pulling x",
        ),
        (container({"terminated": {"reason": "OOMKilled", "exitCode": 137}}), "OOMKilled: exit code 137"),
        (container({"terminated": {"reason": "Error", "exitCode": 1, "message": "bad model\n"}}), "Error: bad model"),
        (container({"terminated": {"reason": "Completed", "exitCode": 0}}), ""),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            "Evicted: The node was low on memory.",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]},
            "Unschedulable: 0/2 nodes",
        ),
        (container({"running": {}}), ""),
    ],
)
def test_waiting(status: dict[str, Any], waiting: str) -> None:
    assert read_pod(body(status)).waiting == waiting


def test_last_words_are_of_the_end_before_when_it_runs_again() -> None:
    pod = read_pod(body(container({"running": {}}, {"terminated": {"exitCode": 1, "message": "no such file\n"}}, restarts=2)))
    assert (pod.last_log, pod.restarts) == ("no such file", 2)


def test_deletion_was_asked_for_a_grace_period_before_its_time() -> None:
    pod = read_pod(body(deletionTimestamp="2026-01-01T00:01:00Z", deletionGracePeriodSeconds=60))
    assert pod.deleted_at == pod.created_at


@pytest.mark.parametrize(
    ("status", "lost"),
    [
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]}, True),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}, False),
        ({"conditions": [{"type": "DisruptionTarget", "status": "False", "reason": "DeletionByTaintManager"}]}, False),
        ({"reason": "NodeLost"}, True),
        ({}, False),
    ],
)
def test_lost(status: dict[str, Any], lost: bool) -> None:
    assert read_pod(body(status)).lost is lost
