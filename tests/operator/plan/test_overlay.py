"""The user's part of the pod template."""

import re
from typing import Any

import pytest
from starling_operator.plan.overlay import overlay

BASE: dict[str, Any] = {
    "metadata": {"labels": {"app": "starling"}, "annotations": {"a": "1"}},
    "spec": {
        "securityContext": {"runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "tolerations": [{"key": "not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}],
        "containers": [
            {
                "name": "agent",
                "image": "agent:1",
                "command": ["starling", "agent"],
                "env": [
                    {"name": "HOME", "value": "/home"},
                    {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "ports": [{"name": "http", "containerPort": 8000}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}],
    },
}


def spec_of(patch: dict[str, Any]) -> dict[str, Any]:
    return overlay(BASE, {"spec": patch})["spec"]


def agent_of(patch: dict[str, Any]) -> dict[str, Any]:
    return next(found for found in spec_of({"containers": [{"name": "agent"} | patch]})["containers"] if found["name"] == "agent")


@pytest.mark.parametrize(
    ("patch", "field", "value"),
    [
        ({"nodeSelector": {"gpu": "yes"}}, "nodeSelector", {"gpu": "yes"}),
        ({"priorityClassName": "high"}, "priorityClassName", "high"),
        ({"serviceAccountName": "mine"}, "serviceAccountName", "mine"),
        ({"affinity": {"nodeAffinity": {"x": [1]}}}, "affinity", {"nodeAffinity": {"x": [1]}}),
        (
            {"securityContext": {"runAsUser": 20000}},
            "securityContext",
            {"runAsUser": 20000, "seccompProfile": {"type": "RuntimeDefault"}},
        ),
        ({"securityContext": {"seccompProfile": None}}, "securityContext", {"runAsUser": 65532}),
        (
            {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
            "securityContext",
            {"runAsUser": 65532, "seccompProfile": {"type": "Unconfined"}},
        ),
        ({"hostNetwork": False}, "hostNetwork", False),
        (
            {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
            "tolerations",
            [*BASE["spec"]["tolerations"], {"key": "gpu", "operator": "Exists"}],
        ),
        *(
            ({"tolerations": [theirs]}, "tolerations", [theirs])
            for theirs in (
                {"key": "not-ready", "operator": "Exists"},
                {"key": "not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"operator": "Exists"},
            )
        ),
        (
            {"tolerations": [{"key": "not-ready", "operator": "Exists", "effect": "NoSchedule"}]},
            "tolerations",
            [*BASE["spec"]["tolerations"], {"key": "not-ready", "operator": "Exists", "effect": "NoSchedule"}],
        ),
        ({"imagePullSecrets": [{"name": "mine"}]}, "imagePullSecrets", [{"name": "mine"}]),
        ({"initContainers": [{"name": "wait", "image": "i"}]}, "initContainers", [{"name": "wait", "image": "i"}]),
        (
            {"volumes": [{"name": "data", "hostPath": {"path": "/x"}}]},
            "volumes",
            [*BASE["spec"]["volumes"], {"name": "data", "hostPath": {"path": "/x"}}],
        ),
        (
            {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]},
            "volumes",
            [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}, BASE["spec"]["volumes"][1]],
        ),
        (
            {"dnsConfig": {"options": [{"name": "ndots", "value": "1"}]}},
            "dnsConfig",
            {"options": [{"name": "ndots", "value": "1"}]},
        ),
        (
            {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}]},
            "hostAliases",
            [{"ip": "10.0.0.1", "hostnames": ["a"]}],
        ),
    ],
)
def test_the_pod_takes_what_the_user_gives(patch: dict[str, Any], field: str, value: Any) -> None:
    assert spec_of(patch)[field] == value


@pytest.mark.parametrize("field", ["securityContext", "tolerations", "volumes"])
def test_null_removes_a_key(field: str) -> None:
    assert field not in spec_of({field: None})


@pytest.mark.parametrize(
    ("patch", "field", "value"),
    [
        ({"image": "mine:2"}, "image", "mine:2"),
        ({"command": ["sh"]}, "command", ["sh"]),
        ({"args": ["-v"]}, "args", ["-v"]),
        ({"resources": {"limits": {"memory": "4Gi"}}}, "resources", {"limits": {"memory": "4Gi"}}),
        (
            {"env": [{"name": "HOME", "value": "/x"}]},
            "env",
            [{"name": "HOME", "value": "/x"}, BASE["spec"]["containers"][0]["env"][1]],
        ),
        (
            {"env": [{"name": "POD", "value": "fixed"}]},
            "env",
            [BASE["spec"]["containers"][0]["env"][0], {"name": "POD", "value": "fixed"}],
        ),
        (
            {"env": [{"name": "NEW", "value": "1"}]},
            "env",
            [*BASE["spec"]["containers"][0]["env"], {"name": "NEW", "value": "1"}],
        ),
        (
            {"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
            "volumeMounts",
            [{"name": "tmp", "mountPath": "/tmp"}, {"name": "data", "mountPath": "/data"}],
        ),
        (
            {"volumeMounts": [{"mountPath": "/tmp", "readOnly": True}]},
            "volumeMounts",
            [{"name": "tmp", "mountPath": "/tmp", "readOnly": True}],
        ),
        ({"ports": [{"containerPort": 8000, "hostPort": 80}]}, "ports", [{"name": "http", "containerPort": 8000, "hostPort": 80}]),
        ({"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}, "lifecycle", {"preStop": {"sleep": {"seconds": 1}}}),
    ],
)
def test_the_agents_container_takes_what_the_user_gives(patch: dict[str, Any], field: str, value: Any) -> None:
    assert agent_of(patch)[field] == value


def test_other_containers_are_added_and_the_agent_stays() -> None:
    containers = spec_of({"containers": [{"name": "sidecar", "image": "s"}]})["containers"]
    assert [container["name"] for container in containers] == ["agent", "sidecar"]
    assert containers[0] == BASE["spec"]["containers"][0]


def test_labels_and_annotations_are_merged() -> None:
    metadata = overlay(BASE, {"metadata": {"labels": {"team": "x"}, "annotations": {"a": None, "b": "2"}}})["metadata"]
    assert metadata == {"labels": {"app": "starling", "team": "x"}, "annotations": {"b": "2"}}


@pytest.mark.parametrize("patch", [{}, {"spec": {}}, {"metadata": {}}, {"spec": {"containers": []}}])
def test_nothing_given_changes_nothing(patch: dict[str, Any]) -> None:
    assert overlay(BASE, patch) == BASE


def test_merging_leaves_its_inputs_as_they_are() -> None:
    before = repr(BASE)
    merged = spec_of({"containers": [{"name": "agent", "env": [{"name": "X", "value": "1"}]}], "securityContext": {"fsGroup": 1}})
    assert repr(BASE) == before
    assert merged != BASE["spec"]


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"kind": "Pod"}, "template.kind: "),
        ({"status": {}}, "template.status: "),
        ({"spec": []}, "template.spec: must be a map"),
        ({"spec": "x"}, "template.spec: must be a map"),
        ({"metadata": {"labels": ["x"]}}, "template.metadata.labels: must be a map"),
        ({"spec": {"containers": {"name": "agent"}}}, "template.spec.containers: must be a list"),
        ({"spec": {"containers": ["agent"]}}, "template.spec.containers[0]: must be a map with name"),
        ({"spec": {"containers": [{"image": "x"}]}}, "template.spec.containers[0]: must be a map with name"),
        ({"spec": {"containers": [{"name": "agent"}, {}]}}, "template.spec.containers[1]: must be a map with name"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "template.spec.volumes[0]: must be a map with name"),
        (
            {"spec": {"containers": [{"name": "agent", "volumeMounts": [{"name": "x"}]}]}},
            "template.spec.containers[0].volumeMounts[0]: must be a map with mountPath",
        ),
        ({"spec": {"containers": [{"name": "agent", "env": "X=1"}]}}, "template.spec.containers[0].env: must be a list"),
        ({"spec": {"tolerations": {"key": "x"}}}, "template.spec.tolerations: must be a list"),
        ({"spec": {"$patch": "replace"}}, "template.spec.$patch: directives"),
        ({"spec": {"containers": [{"name": "agent", "$patch": "delete"}]}}, "template.spec.containers[0].$patch: directives"),
        ({"spec": {"securityContext": {"$retainKeys": ["x"]}}}, "template.spec.securityContext.$retainKeys: directives"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_its_path(patch: dict[str, Any], path: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(path)}"):
        overlay(BASE, patch)
