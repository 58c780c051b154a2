"""Comparison of live objects with manifests."""

from typing import Any

import pytest
from starling_operator.apply.foreign_fields import foreign_paths, lacks_foreign_fields
from starling_operator.watch.is_applied import AppliedObjects, is_applied
from starling_operator.watch.ownership import Ownership, applied_fields, has_leftover_fields


@pytest.mark.parametrize(
    ("live", "wanted", "answer"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 1}}}, True),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, False),
        ({"a": [1, 2]}, {"a": [1, 2]}, True),
        ({"a": [2, 1]}, {"a": [1, 2]}, False),
        ({"a": [1, 2, 3]}, {"a": [1, 2]}, False),
        ({"a": [{"name": "x", "default": 1}]}, {"a": [{"name": "x"}]}, True),
        ({"a": "x"}, {"a": {"b": 1}}, False),
        ({"a": None}, {"a": {"b": 1}}, False),
        ({}, {"a": None}, True),
        ({"a": {}}, {"a": {}}, True),
        ({"a": True}, {"a": True}, True),
        ({"a": "1"}, {"a": 1}, False),
        ({"selector": {"a": "1", "b": "2"}}, {"selector": {"a": "1"}}, False),
        ({"selector": {"matchLabels": {"a": "1", "b": "2"}}}, {"selector": {"matchLabels": {"a": "1"}}}, False),
        ({"selector": {"a": "1"}}, {"selector": {"a": "1"}}, True),
    ],
)
def test_holds(live: dict[str, Any], wanted: dict[str, Any], answer: bool) -> None:
    assert is_applied(live, wanted) is answer


def _live(cpu: str, version: str = "1", label: str = "a") -> dict[str, Any]:
    metadata = {"uid": "u", "resourceVersion": version, "labels": {"l": label}}
    return {"metadata": metadata, "spec": {"cpu": cpu}, "status": {"seen": version}}


def test_what_the_api_server_writes_in_its_own_way_is_settled_until_somebody_changes_it() -> None:
    settled, wanted = AppliedObjects(), {"spec": {"cpu": "1000m"}}
    settled.remember(_live("1"), wanted)
    assert settled.knows(_live("1", version="2"), wanted)
    assert not settled.knows(_live("2", version="2"), wanted)
    assert not settled.knows(_live("1", version="2", label="b"), wanted)
    assert not settled.knows(_live("1"), {"spec": {"cpu": "2000m"}})


FIELDS = {
    "f:metadata": {"f:labels": {"f:a": {}}},
    "f:spec": {
        "f:selector": {},
        "f:ports": {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}}},
        "f:tags": {'v:"x"': {}},
    },
}


def _wanted(**spec: Any) -> dict[str, Any]:
    base = {"selector": {"s": "1"}, "ports": [{"name": "http", "port": 80}], "tags": ["x"]}
    return {"metadata": {"labels": {"a": "1"}}, "spec": {**base, **spec}}


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        (_wanted(), False),
        (_wanted(more=1), False),
        (_wanted(ports=[{"name": "http", "port": 80, "protocol": "TCP"}]), False),
        (_wanted(ports=[{"name": "http", "port": 81}]), True),
        (_wanted(ports=[{"port": 80}]), True),
        (_wanted(tags=["y"]), True),
        ({**_wanted(), "metadata": {"labels": {}}}, True),
        ({"metadata": {"labels": {"a": "1"}}}, True),
    ],
)
def test_left_over(wanted: dict[str, Any], answer: bool) -> None:
    assert has_leftover_fields(FIELDS, wanted) is answer


def test_only_what_we_applied_is_ours() -> None:
    ours = {"manager": "starling-operator", "operation": "Apply", "fieldsV1": FIELDS}
    others = [
        {**ours, "manager": "kubectl"},
        {**ours, "operation": "Update"},
        {**ours, "subresource": "status"},
    ]
    assert applied_fields({"managedFields": others}) == ""
    live = {"metadata": {"uid": "u", "managedFields": applied_fields({"managedFields": [*others, ours]})}}
    ownership = Ownership()
    assert ownership.has_leftover_fields(live, _wanted(tags=["y"])) and not ownership.has_leftover_fields(live, _wanted())
    assert not ownership.has_leftover_fields({"metadata": {"uid": "v", "managedFields": ""}}, {})


HTTP, PODS = {"name": "http", "port": 80, "protocol": "TCP"}, {"name": "pods", "port": 8000, "protocol": "TCP"}
OTHER = {"name": "x", "port": 9, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("kind", "live", "wanted", "found"),
    [
        ("Service", {"ports": [HTTP, PODS]}, {"ports": [HTTP, PODS]}, []),
        ("Service", {"ports": [HTTP | {"nodePort": 3, "appProtocol": "http"}], "type": "ClusterIP"}, {"ports": [HTTP]}, []),
        ("Service", {"ports": [OTHER, HTTP, OTHER, PODS]}, {"ports": [HTTP, PODS]}, ["/spec/ports/2", "/spec/ports/0"]),
        ("NetworkPolicy", {"ingress": [], "egress": []}, {"ingress": []}, ["/spec/egress"]),
        ("NetworkPolicy", {"ingress": [{}]}, {"ingress": [{}]}, []),
        ("StatefulSet", {"replicas": 1, "more": [1]}, {"replicas": 1}, []),
    ],
)
def test_foreign_paths(kind: str, live: dict[str, Any], wanted: dict[str, Any], found: list[str]) -> None:
    body = {"kind": kind, "spec": wanted}
    assert foreign_paths({"kind": kind, "spec": live}, body) == found
    assert lacks_foreign_fields({"kind": kind, "spec": live}, body) is (not found)


def test_a_policy_is_exact_to_its_last_field() -> None:
    wanted = {"kind": "NetworkPolicy", "spec": {"ingress": [{"from": [{"podSelector": {}}]}]}}
    live = {"kind": "NetworkPolicy", "spec": {"ingress": [{"from": [{"podSelector": {}, "namespaceSelector": {}}]}]}}
    assert is_applied(live, wanted) and not lacks_foreign_fields(live, wanted)


def test_a_child_without_a_spec_has_no_foreign_paths() -> None:
    assert foreign_paths({"kind": "ServiceAccount"}, {"kind": "ServiceAccount"}) == []
