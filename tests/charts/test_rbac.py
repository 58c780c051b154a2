"""What the operator may do: every verb that it uses, with its use, and no verb more."""

from collections.abc import Iterator

import pytest
from starling_operator.cluster.kinds import CHILDREN, INFERENCE_SERVICE, OPTIONAL, POD, SECRET, WATCHED
from starling_operator.cluster.operator_key import NAME

from tests.charts.helm import Helm, Manifest, the

pytestmark = pytest.mark.timeout(120, func_only=True)

Right = tuple[str, str, str]
"""API group, resource, verb."""

KEPT = "kept in memory, so that a quiet reconcile asks for nothing"
LISTED = "on a clock, for its CRD may come and go"
TAKEN = "a name that is taken: whose is it?"
APPLIED = "server-side apply"
MADE = "made by create, or by the first server-side apply"

USES: dict[tuple[str, str], dict[str, str]] = {
    ("serving.starling.dev", "inferenceservices"): {"list": KEPT, "watch": KEPT},
    ("serving.starling.dev", "inferenceservices/status"): {"patch": APPLIED},
    ("serving.starling.dev", "parallelismscales"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "patch": APPLIED,
        "delete": "of a service that is no longer elastic",
    },
    ("serving.starling.dev", "parallelismscales/status"): {"patch": APPLIED},
    ("", "pods"): {"list": KEPT, "watch": KEPT, "delete": "restart of a group; pods of a dead node"},
    ("apps", "controllerrevisions"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "delete": "all but the newest without groups",
    },
    ("", "configmaps"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "patch": "what routers are told of a canary",
        "delete": "with its revision, or the canary",
    },
    ("", "secrets"): {
        "create": "the token of a service, and of its routers; what it holds is known without reading it",
        "list": "has one with API keys changed? Those of the names in apiKeySecrets alone",
    },
    ("", "pods/status"): {"patch": "an annotation, so that the kubelet brings the keys that changed"},
    ("apps", "statefulsets"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "patch": APPLIED,
        "delete": "with its group",
    },
    ("", "services"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "patch": APPLIED,
        "delete": "with its group; with spec.router; with its InferencePool",
    },
    ("apps", "deployments"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "patch": APPLIED,
        "delete": "with spec.router",
    },
    ("policy", "poddisruptionbudgets"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "patch": APPLIED,
        "delete": "the routers', with spec.router",
    },
    ("networking.k8s.io", "networkpolicies"): {
        "get": TAKEN,
        "list": KEPT,
        "watch": KEPT,
        "create": MADE,
        "patch": APPLIED,
        "delete": "the routers', with spec.router",
    },
    ("events.k8s.io", "events"): {"create": "transitions, for kubectl describe", "list": "why are a group's pods not made?"},
    ("monitoring.coreos.com", "servicemonitors"): {"get": TAKEN, "list": LISTED, "create": MADE, "patch": APPLIED},
    ("gateway.networking.k8s.io", "httproutes"): {
        "get": TAKEN,
        "list": LISTED,
        "create": MADE,
        "patch": APPLIED,
        "delete": "of a service that asks for none any more",
    },
    ("inference.networking.k8s.io", "inferencepools"): {
        "get": TAKEN,
        "list": LISTED,
        "create": MADE,
        "patch": APPLIED,
        "delete": "of a service whose route leads to none any more",
    },
    ("", "serviceaccounts"): {"get": TAKEN, "list": KEPT, "watch": KEPT, "create": MADE, "patch": APPLIED},
}
EVERYWHERE: dict[tuple[str, str], dict[str, str]] = {
    ("", "nodes"): {"get": "is the node of an evicted pod gone?", "list": "which are cordoned?"}
}
"""Only in a ClusterRole: a Role cannot speak of what is in no namespace."""


def _rights(role: Manifest) -> Iterator[Right]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield from ((group, resource, verb) for verb in rule["verbs"])


@pytest.mark.parametrize("kind, values, more", [("ClusterRole", {}, EVERYWHERE), ("Role", {"watchNamespaces": ["blue"]}, {})])
def test_every_verb_that_is_granted_has_a_use_and_the_reverse(
    helm: Helm, kind: str, values: Manifest, more: dict[tuple[str, str], dict[str, str]]
) -> None:
    granted = list(_rights(the(helm.objects(values), kind, "starling-operator")))
    assert len(granted) == len(set(granted))
    assert set(granted) == {(*key, verb) for key, verbs in (USES | more).items() for verb in verbs}


def test_every_kind_that_is_watched_may_be_watched() -> None:
    for kind in WATCHED:
        assert {"list", "watch"} <= USES[kind.group, kind.plural].keys(), kind
    for kind in OPTIONAL:
        assert "list" in USES[kind.group, kind.plural], kind


def test_nothing_else_is_touched() -> None:
    ours = {(kind.group, kind.plural) for kind in (INFERENCE_SERVICE, POD, SECRET, *CHILDREN, *OPTIONAL)}
    statuses = {("serving.starling.dev", f"{kind}/status") for kind in ("inferenceservices", "parallelismscales")}
    assert USES.keys() - ours == statuses | {("events.k8s.io", "events"), ("", "pods/status")}


def test_no_lease_but_its_own_may_be_renewed_and_no_secret_but_its_key_be_read(helm: Helm) -> None:
    role = the(helm.objects({}), "Role", "starling-operator-own")
    named = [rule for rule in role["rules"] if rule["verbs"] != ["create"]]
    assert [(rule["resources"], rule["resourceNames"], rule["verbs"]) for rule in named] == [
        (["leases"], ["starling-operator"], ["get", "update"]),
        (["secrets"], [NAME], ["get"]),
    ]
    assert {right[:2] for right in _rights(role)} == {("coordination.k8s.io", "leases"), ("", "secrets")}


@pytest.mark.parametrize("names", [["starling-api-keys"], ["keys-a", "keys-b"], []])
def test_no_secret_may_be_listed_but_those_with_the_given_names(helm: Helm, names: list[str]) -> None:
    """A rule without names would be for all Secrets."""
    rules = the(helm.objects({"apiKeySecrets": names}), "ClusterRole", "starling-operator")["rules"]
    listed = [rule for rule in rules if "secrets" in rule["resources"] and rule["verbs"] != ["create"]]
    assert [(rule["resourceNames"], rule["verbs"]) for rule in listed] == ([(names, ["list"])] if names else [])
    assert bool(names) is any("pods/status" in rule["resources"] for rule in rules)


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["blue", "green"]}])
def test_every_binding_is_to_the_operators_account(helm: Helm, values: Manifest) -> None:
    objects = helm.objects(values)
    account = the(objects, "ServiceAccount")["metadata"]
    for binding in [item for item in objects if item["kind"].endswith("Binding")]:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}]
        named = {(item["kind"], item["metadata"]["name"], item["metadata"].get("namespace")) for item in objects}
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"], binding["metadata"].get("namespace")) in named


@pytest.mark.parametrize(
    "role, changes, scales, corrects",
    [("admin", True, True, True), ("editor", True, True, False), ("viewer", False, False, False)],
)
def test_what_people_may(helm: Helm, role: str, changes: bool, scales: bool, corrects: bool) -> None:
    rights = set(_rights(the(helm.objects({}), "ClusterRole", f"starling-{role}")))
    group = "serving.starling.dev"
    assert {(group, "inferenceservices", verb) for verb in ("get", "list", "watch")} <= rights
    assert ((group, "inferenceservices", "create") in rights) is changes
    assert ((group, "inferenceservices", "deletecollection") in rights) is changes
    assert ((group, "inferenceservices/scale", "patch") in rights) is scales
    assert ((group, "parallelismscales/scale", "patch") in rights) is scales
    assert (group, "parallelismscales", "watch") in rights
    assert not {(group, "parallelismscales", verb) for verb in ("create", "delete")} & rights
    assert ((group, "inferenceservices/status", "patch") in rights) is corrects
    assert {right[0] for right in rights} == {group}
