"""What a NetworkPolicy means to a packet, as the harness of the end-to-end run enforces it."""

from typing import Any

import pytest
from starling_cluster.policies import Seen, matches, ruleset

Object = dict[str, Any]
CLIENT = {"app": "client"}


def pod(name: str, address: str, namespace: str = "own", labels: Object | None = None, **status: str) -> Object:
    container = {"name": "main", "ports": [{"name": "http", "containerPort": 8000}]}
    metadata = {"name": name, "namespace": namespace, "labels": labels or {"app": name}}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": {"podIP": address, **status}}


PODS = (
    pod("server", "10.0.0.1"),
    pod("client", "10.0.0.2"),
    pod("client", "10.0.0.3", "other"),
    pod("client", "10.0.0.4", phase="Succeeded"),
)
NAMESPACES = tuple({"metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}}} for name in ("own", "other"))
OTHER = {"matchLabels": {"kubernetes.io/metadata.name": "other"}}
NO_ONE: Object = {"podSelector": {"matchLabels": {"app": "nobody"}}}


def rules_of(spec: Object) -> list[str]:
    """For `server`, in the order in which they are tried."""
    spec = {"podSelector": {"matchLabels": {"app": "server"}}} | spec
    policy = {"metadata": {"name": "it", "namespace": "own"}, "spec": spec}
    lines = [line.strip() for line in ruleset(Seen((policy,), PODS, NAMESPACES)).splitlines()]
    return [line.replace("10.0.0.1 ", "", 1) for line in lines if " 10.0.0.1 " in line]


@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        ({}, ["ip daddr drop"]),
        ({"ingress": [{}]}, ["ip daddr return", "ip daddr drop"]),
        ({"ingress": [{"ports": [{"port": 8000}]}]}, ["ip daddr tcp dport 8000 return", "ip daddr drop"]),
        ({"ingress": [{"ports": [{"port": "http"}]}]}, ["ip daddr tcp dport 8000 return", "ip daddr drop"]),
        ({"ingress": [{"ports": [{"port": "unknown"}]}]}, ["ip daddr drop"]),
        ({"ingress": [{"ports": [{"protocol": "UDP"}]}]}, ["ip daddr ip protocol udp return", "ip daddr drop"]),
        (
            {"ingress": [{"ports": [{"port": 15000, "endPort": 17000, "protocol": "TCP"}]}]},
            ["ip daddr tcp dport 15000-17000 return", "ip daddr drop"],
        ),
        (
            {"ingress": [{"from": [{"podSelector": {"matchLabels": CLIENT}}]}]},
            ["ip daddr ip saddr { 10.0.0.2 } return", "ip daddr drop"],
        ),
        ({"ingress": [{"from": [NO_ONE]}]}, ["ip daddr drop"]),
        (
            {"ingress": [{"from": [{"namespaceSelector": OTHER, "podSelector": {"matchLabels": CLIENT}}]}]},
            ["ip daddr ip saddr { 10.0.0.3 } return", "ip daddr drop"],
        ),
        (
            {"ingress": [{"from": [{"namespaceSelector": {}}]}]},
            ["ip daddr ip saddr { 10.0.0.1, 10.0.0.2, 10.0.0.3 } return", "ip daddr drop"],
        ),
        (
            {"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.9.0.0/16"]}}]}]},
            ["ip daddr ip saddr 10.0.0.0/8 ip saddr != { 10.9.0.0/16 } return", "ip daddr drop"],
        ),
        (
            {"policyTypes": ["Egress"], "egress": [{"to": [{"podSelector": {"matchLabels": CLIENT}}], "ports": [{"port": 53}]}]},
            ["ip saddr ip daddr { 10.0.0.2 } tcp dport 53 return", "ip saddr drop"],
        ),
        ({"policyTypes": ["Ingress", "Egress"]}, ["ip saddr drop", "ip daddr drop"]),
        ({"podSelector": {"matchLabels": {"app": "another"}}}, []),
    ],
)
def test_a_policy_becomes_rules(spec: Object, rules: list[str]) -> None:
    assert rules_of(spec) == rules


@pytest.mark.parametrize(
    ("expression", "taken"),
    [
        ({"operator": "In", "values": ["a", "b"]}, True),
        ({"operator": "In", "values": ["b"]}, False),
        ({"operator": "NotIn", "values": ["b"]}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "DoesNotExist"}, False),
    ],
)
def test_a_selector_takes_labels(expression: Object, taken: bool) -> None:
    assert matches({"matchExpressions": [{"key": "app", **expression}]}, {"app": "a"}) is taken
