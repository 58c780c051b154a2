"""The children: what each holds, and what all have in common."""

import hmac
from dataclasses import replace
from typing import Any

import pytest
from starling_operator.plan.admin_token import secret_name, token_of
from starling_operator.plan.decision import Decision
from starling_operator.plan.observed import Manifest, Settings
from starling_operator.plan.plan import plan

from tests.operator.plan.building import SETTINGS, TOKEN, conditions_of, decoded, make_observed, make_service, make_spec, message_of
from tests.operator.plan.world import World

ALL = replace(SETTINGS, service_monitors=True, operator_namespace="ops", operator_labels={"app": "op"})


def decided(changes: dict[str, Any] | None = None, settings: Settings = SETTINGS) -> Decision:
    return plan(make_observed(make_spec(changes), settings=settings))


def child(kind: str, changes: dict[str, Any] | None = None, settings: Settings = SETTINGS, name: str | None = None) -> Manifest:
    decision = decided(changes, settings)
    found = [made for made in (*decision.create, *decision.apply) if made["kind"] == kind]
    return next(made for made in found if name is None or made["metadata"]["name"] == name)


def test_a_new_service_gets_all_its_children_at_once() -> None:
    decision = decided()
    revision = decision.status.revision.target
    assert [(made["kind"], made["metadata"]["name"]) for made in decision.create] == [
        ("Secret", secret_name("chat", TOKEN)),
        ("ControllerRevision", f"chat-{revision}"),
        ("ConfigMap", f"chat-{revision}"),
    ]
    assert [(made["kind"], made["metadata"]["name"]) for made in decision.apply] == [
        ("ServiceAccount", "chat-agent"),
        ("Service", "chat"),
        ("NetworkPolicy", "chat"),
        ("PodDisruptionBudget", "chat"),
        ("Service", f"chat-{revision}-0"),
        ("StatefulSet", f"chat-{revision}-0"),
    ]


def test_a_service_monitor_only_where_the_cluster_has_them() -> None:
    kinds = {made["kind"] for made in decided(settings=ALL).apply} - {made["kind"] for made in decided().apply}
    assert kinds == {"ServiceMonitor"}


def test_every_child_is_owned_labelled_and_in_the_service_s_namespace() -> None:
    decision = decided({"router": {}, "endpoint": {"route": {"parentRefs": [{"name": "edge"}], "backend": "InferencePool"}}}, ALL)
    for made in (*decision.create, *decision.apply):
        metadata = made["metadata"]
        assert metadata["namespace"] == "prod"
        (owner,) = metadata["ownerReferences"]
        assert owner == {
            "apiVersion": "serving.starling.dev/v1alpha1",
            "kind": "InferenceService",
            "name": "chat",
            "uid": "service-uid",
            "controller": True,
            "blockOwnerDeletion": False,
        }
        assert (
            metadata["labels"].items()
            >= {
                "app.kubernetes.io/name": "starling",
                "app.kubernetes.io/instance": "chat",
                "app.kubernetes.io/component": "agent",
                "app.kubernetes.io/part-of": "starling",
                "app.kubernetes.io/managed-by": "starling-operator",
                "serving.starling.dev/service": "chat",
            }.items()
        )
        assert "finalizers" not in metadata


def test_the_token_of_a_service_follows_from_the_operator_s_key_and_the_service_alone() -> None:
    service = make_service()
    token = token_of(b"k" * 32, service)
    assert token == hmac.new(b"k" * 32, b"prod/service-uid", "sha256").hexdigest()
    assert token == token_of(b"k" * 32, replace(service, generation=9))
    others = [replace(service, uid="another"), replace(service, namespace="another")]
    assert len({token, token_of(b"j" * 32, service), *(token_of(b"k" * 32, other) for other in others)}) == 4


def test_the_token_s_secret_is_mounted_by_pods_and_is_no_part_of_a_revision() -> None:
    secret, pod = child("Secret"), child("StatefulSet")["spec"]["template"]["spec"]
    assert decoded(secret["data"]["token"]) == TOKEN and secret["immutable"]
    [mounted] = [volume for volume in pod["volumes"] if volume["name"] == "admin"]
    assert mounted["secret"] == {"secretName": secret["metadata"]["name"], "items": [{"key": "token", "path": "token"}]}
    assert "admin" not in [volume["name"] for volume in child("ControllerRevision")["data"]["template"]["spec"]["volumes"]]


def test_another_token_has_a_secret_of_another_name_which_pods_that_are_made_again_mount() -> None:
    """The operator's key was lost, or a pod is of a release whose tokens were random: nothing restarts by itself."""
    world = World()
    world.settle()
    revision = plan(world.observe()).status.revision
    decision = plan(replace(world.observe(), token="another"))
    [group] = [made for made in decision.apply if made["kind"] == "StatefulSet"]
    assert str(group["spec"]["template"]["spec"]["volumes"]).count(secret_name("chat", "another")) == 1
    assert (decision.status.revision, decision.delete, decision.create) == (revision, (), ())
    assert secret_name("chat", "another") != secret_name("chat", TOKEN)


def test_a_service_whose_agents_refuse_the_token_is_stalled_and_goes_on() -> None:
    world = World()
    world.settle()
    observed = world.observe()
    deaf = tuple(replace(pod, report=None, refuses_token=True) for pod in observed.pods)
    decision = plan(replace(observed, pods=deaf))
    conditions = conditions_of(decision.status)
    assert (conditions["Stalled"], conditions["Available"]) == (("True", "TokenRefused"), ("True", "GroupsServe"))
    reason = message_of(decision.status, "Stalled")
    assert deaf[0].name in reason and secret_name("chat", TOKEN) in reason
    assert decision.delete == ()
    budget, before = ([made for made in each.apply if made["kind"] == "PodDisruptionBudget"] for each in (decision, plan(observed)))
    assert budget == before, "evictions are as they were"


def test_the_token_s_secret_is_asked_for_while_a_pod_is_to_mount_it() -> None:
    world = World()
    world.settle()
    name = secret_name("chat", TOKEN)
    del world.children["Secret", name]
    assert plan(world.observe()).create == ()
    world.pods[0].phase = "Pending"
    assert [made["metadata"]["name"] for made in plan(world.observe()).create] == [name]


@pytest.mark.parametrize(
    ("port", "ports"),
    [
        (80, [("http", 80, 8000), ("pods", 8000, 8000)]),
        (8080, [("http", 8080, 8000), ("pods", 8000, 8000)]),
        (8000, [("http", 8000, 8000)]),
    ],
)
def test_the_service(port: int, ports: list[tuple[str, int, int]]) -> None:
    spec = child("Service", {"endpoint": {"port": port}}, name="chat")["spec"]
    assert [(entry["name"], entry["port"], entry["targetPort"]) for entry in spec["ports"]] == ports
    assert spec["selector"] == {"serving.starling.dev/service": "chat", "serving.starling.dev/role": "serving"}
    assert "publishNotReadyAddresses" not in spec


def test_the_network_policy_opens_the_endpoint_to_all_and_the_rest_to_few() -> None:
    spec = child("NetworkPolicy", settings=ALL)["spec"]
    own = {"podSelector": {"matchLabels": {"serving.starling.dev/service": "chat"}}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ops"}},
        "podSelector": {"matchLabels": {"app": "op"}},
    }
    assert spec["policyTypes"] == ["Ingress"]
    assert spec["podSelector"] == own["podSelector"]
    assert spec["ingress"] == [
        {"ports": [{"port": 8000, "protocol": "TCP"}]},
        {"from": [own]},
        {"from": [operator], "ports": [{"port": 8001, "protocol": "TCP"}]},
    ]


def test_pods_that_share_a_store_read_from_each_other() -> None:
    *usual, offered = child("NetworkPolicy", {"kvCache": {"store": "mooncake://s:50051"}}, ALL)["spec"]["ingress"]
    assert usual == child("NetworkPolicy", settings=ALL)["spec"]["ingress"]
    agents = {"app.kubernetes.io/name": "starling", "app.kubernetes.io/component": "agent"}
    assert offered["from"] == [{"podSelector": {"matchLabels": agents}}], (
        "of this namespace: others may label their pods as they like"
    )
    (ports,) = offered["ports"]
    assert (ports["port"], ports["endPort"]) == (15000, 17000)
    labels = World().decide().apply[-1]["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= agents.items()


def test_the_service_account_has_no_token() -> None:
    assert child("ServiceAccount")["automountServiceAccountToken"] is False


@pytest.mark.parametrize(("tls", "scheme"), [(None, None), ("t", "https")])
def test_the_service_monitor(tls: str | None, scheme: str | None) -> None:
    monitor = child("ServiceMonitor", {"endpoint": {"tlsSecret": tls}}, ALL)["spec"]
    (endpoint,) = monitor["endpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint.get("scheme")) == ("http", "/metrics", scheme)
    wanted = monitor["selector"]["matchLabels"].items()
    services = [made for made in decided().apply if made["kind"] == "Service"]
    matching = [made["metadata"]["name"] for made in services if made["metadata"]["labels"].items() >= wanted]
    assert matching == ["chat"], "not the groups' headless ones"


def test_a_group() -> None:
    world = World({"parallelism": {"tensor": 4}, "accelerators": {"perNode": 2}})
    decision = world.decide()
    headless, live = decision.apply[-2:]
    name = live["metadata"]["name"]
    assert headless["metadata"]["name"] == live["spec"]["serviceName"] == name
    assert live["spec"]["replicas"] == 2
    assert live["spec"]["podManagementPolicy"] == "Parallel"
    assert live["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"] is True
    labels = live["spec"]["template"]["metadata"]["labels"]
    selector = live["spec"]["selector"]["matchLabels"]
    assert headless["spec"]["selector"] == selector
    assert labels.items() >= selector.items()
    assert labels["serving.starling.dev/group"] == name
    assert labels["serving.starling.dev/revision"] == decision.status.revision.target
    assert labels["serving.starling.dev/role"] == "serving"


def test_drift_is_undone_by_what_is_applied() -> None:
    world = World()
    world.settle()
    before = world.decide().apply
    world.children["Service", "chat"]["spec"]["selector"] = {}
    world.sets()[0]["spec"]["replicas"] = 3
    assert world.decide().apply == before


def test_another_size_without_elastic_bounds_makes_new_groups() -> None:
    world = World({"parallelism": {"data": 2}})
    world.settle()
    (before,) = (live["metadata"]["name"] for live in world.sets())
    world.edit({"parallelism": {"data": 3}})
    sizes = {made["metadata"]["name"]: made["spec"]["replicas"] for made in world.decide().apply if made["kind"] == "StatefulSet"}
    assert sizes.pop(before) == 2
    assert list(sizes.values()) == [3]
