"""A pod's body, read."""

import math
from typing import Any

import pytest
from starling_operator.plan.observed import Manifest
from starling_operator.watch.pods import read_pod

DISRUPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]

BY_KUBELET = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]


def body(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    labels = {f"serving.starling.dev/{key}": value for key, value in {"service": "c", "group": "c-r-0", "revision": "r"}.items()}
    base = {"name": "c-r-0-1", "namespace": "n", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": {**base, **metadata}, "spec": {"nodeName": "n1"}, "status": status or {}}


def container(state: dict[str, Any], last: dict[str, Any] | None = None, restarts: int = 0) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "agent", "state": state, "lastState": last or {}, "restartCount": restarts}]}


def test_identity() -> None:
    pod = read_pod(body({"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}))
    assert (pod.group, pod.revision, pod.number, pod.cluster_node, pod.scheduled) == ("c-r-0", "r", 1, "n1", True)
    assert (pod.address, pod.ready, pod.phase, pod.deleted_at, pod.waiting) == ("10.0.0.1", True, "Running", None, "")
    assert pod.created_at == 1767225600.0
    assert read_pod(body(ownerReferences=[{"uid": "a"}, {"uid": "set", "controller": True}])).owner == "set"


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


def test_the_termination_message_is_of_the_previous_end_when_it_runs_again() -> None:
    pod = read_pod(body(container({"running": {}}, {"terminated": {"exitCode": 1, "message": "no such file\n"}}, restarts=2)))
    assert (pod.termination_message, pod.restarts) == ("no such file", 2)


@pytest.mark.parametrize(
    ("metadata", "status", "drains"),
    [
        ({}, {}, False),
        ({}, {"conditions": DISRUPTED}, False),
        ({"deletionGracePeriodSeconds": 140}, {}, True),
        ({"deletionGracePeriodSeconds": 600}, {}, True),
        # a broken group's pods, as the operator restarts them
        ({"deletionGracePeriodSeconds": 10}, {}, False),
        # an eviction with less than the pod's grace period
        ({"deletionGracePeriodSeconds": 10}, {"conditions": DISRUPTED}, True),
        # its StatefulSet recreates it
        ({"deletionGracePeriodSeconds": 140}, {"phase": "Failed"}, False),
        ({"deletionGracePeriodSeconds": 140}, {"phase": "Failed", "conditions": DISRUPTED}, False),
        # its node shut down, which a kubelet reports without deleting the pod
        ({}, {"phase": "Failed", "reason": "Terminated", "conditions": BY_KUBELET}, True),
        ({}, {"phase": "Running", "conditions": BY_KUBELET}, True),
        # memory was short, which the pod may have caused
        ({}, {"phase": "Failed", "reason": "Evicted", "conditions": BY_KUBELET}, False),
    ],
)
def test_a_pod_drains_if_it_gets_its_grace_period(metadata: Manifest, status: Manifest, drains: bool) -> None:
    if metadata:
        metadata = metadata | {"deletionTimestamp": "2026-01-01T00:03:00Z"}
    made = body(status, **metadata)
    made["spec"]["terminationGracePeriodSeconds"] = 140
    assert read_pod(made).drains is drains


def test_deletion_was_requested_a_grace_period_before_its_time() -> None:
    pod = read_pod(body(deletionTimestamp="2026-01-01T00:01:00Z", deletionGracePeriodSeconds=60))
    assert pod.deleted_at == pod.created_at and pod.grace_ends_at == pod.created_at + 60


@pytest.mark.parametrize(
    ("status", "evicted", "lost"),
    [
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]}, True, False),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}, False, False),
        ({"conditions": [{"type": "DisruptionTarget", "status": "False", "reason": "DeletionByTaintManager"}]}, False, False),
        ({"reason": "NodeLost"}, False, True),
        ({}, False, False),
    ],
)
def test_a_taint_evicts_and_alone_loses_nothing(status: dict[str, Any], evicted: bool, lost: bool) -> None:
    pod = read_pod(body(status))
    assert (pod.evicted_by_taint, pod.lost) == (evicted, lost)


UNREADY = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("conditions", "since"),
    [
        ([UNREADY, {"type": "ContainersReady", "status": "True"}], 1767225600.0),
        ([UNREADY | {"reason": "ContainersNotReady"}, {"type": "ContainersReady", "status": "False"}], None),
        ([UNREADY | {"reason": "ReadinessGatesNotReady"}, {"type": "ContainersReady", "status": "True"}], None),
        ([UNREADY | {"status": "True"}, {"type": "ContainersReady", "status": "True"}], None),
        ([UNREADY], None),
        ([], None),
    ],
)
def test_the_node_controllers_mark(conditions: list[dict[str, Any]], since: float | None) -> None:
    assert read_pod(body({"conditions": conditions})).unreported_since == since


def _tolerating(**seconds: int | None) -> dict[str, Any]:
    keys = {"unready": "not-ready", "unreachable": "unreachable"}
    made = body()
    made["spec"]["tolerations"] = [
        {"key": f"node.kubernetes.io/{keys[name]}"} | ({} if value is None else {"tolerationSeconds": value})
        for name, value in seconds.items()
    ]
    return made


def _with_tolerations(*tolerations: dict[str, Any]) -> dict[str, Any]:
    made = body()
    made["spec"]["tolerations"] = list(tolerations)
    return made


@pytest.mark.parametrize(
    ("pod", "seconds"),
    [
        (_tolerating(unready=30, unreachable=20), 20.0),
        (_tolerating(unready=30, unreachable=None), 30.0),
        (_tolerating(unready=None, unreachable=None), math.inf),
        (_tolerating(unready=30), 0.0),
        (_with_tolerations(*_tolerating(unready=30, unreachable=300)["spec"]["tolerations"], {"operator": "Exists"}), 30.0),
        (_with_tolerations({"operator": "Exists"}), math.inf),
        (_with_tolerations({"operator": "Exists", "effect": "NoSchedule"}), 0.0),
        (body(), 0.0),
    ],
)
def test_how_long_a_pod_stays_on_a_node_that_is_not_ready(pod: dict[str, Any], seconds: float) -> None:
    assert read_pod(pod).toleration_seconds == seconds
