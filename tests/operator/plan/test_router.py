"""spec.router: its children, when the Service for clients leads to it, and what is said of it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starling_agent.contract.router import router_token
from starling_cli.main import app
from starling_operator.plan.endpoint_policy import OPEN_SECONDS
from starling_operator.plan.observed import Manifest
from starling_operator.plan.plan import plan
from starling_operator.plan.revision import spec_hash
from starling_operator.plan.router import HANDOVER_SECONDS, answers_routers_alone
from starling_operator.plan.router_pods import TENANTS
from starling_router.tenants import Tenant, read_tenants
from typer.main import get_command

from tests.operator.plan.building import SETTINGS, TOKEN, conditions_of, decoded, make_observed, make_service, make_spec
from tests.operator.plan.world import World

ROUTER: dict[str, Any] = {"router": {}}
CHAT, BATCH = {"name": "chat", "priority": 1}, {"name": "batch", "weight": 0.5, "tokensPerMinute": 1000, "concurrent": 2}
SHARED: dict[str, Any] = {"router": {"tenants": [CHAT, BATCH], "tenantKeysSecret": "starling-api-keys"}}
AGENTS = {"serving.starling.dev/service": "chat", "serving.starling.dev/role": "serving"}
ROUTERS = {"serving.starling.dev/router": "chat"}
OF_ROUTER = {
    ("Deployment", "chat-router"),
    ("PodDisruptionBudget", "chat-router"),
    ("NetworkPolicy", "chat-router"),
    ("Service", "chat-backends"),
}


def settled(changes: dict[str, Any]) -> World:
    world = World(changes)
    world.settle()
    return world


def of_router(changes: dict[str, Any], kind: str, settings: Any = SETTINGS) -> Manifest:
    decision = plan(make_observed(make_spec(changes), settings=settings))
    names = {name for of, name in OF_ROUTER if of == kind}
    return next(made for made in decision.apply if made["kind"] == kind and made["metadata"]["name"] in names)


def selected(world: World) -> dict[str, str]:
    found: dict[str, str] = world.children["Service", "chat"]["spec"]["selector"]
    return found


def arguments(changes: dict[str, Any]) -> list[str]:
    (container,) = of_router(changes, "Deployment")["spec"]["template"]["spec"]["containers"]
    return list(container["command"][2:])


def test_a_service_without_routers_has_nothing_of_them() -> None:
    world = settled({})
    assert not OF_ROUTER & world.children.keys()
    assert selected(world) == AGENTS and world.status.router is None
    assert not [name for kind, name in world.children if kind == "Secret" and "router" in name]


def test_it_is_no_part_of_a_revision() -> None:
    world = settled({})
    before = {pod.uid for pod in world.pods}
    assert spec_hash(make_spec(ROUTER)) == spec_hash(make_spec())
    for change in (ROUTER, {"router": {"replicas": 3, "hold": {"seconds": 1}}}, {"router": None}):
        world.edit(change)
        world.settle()
        assert {pod.uid for pod in world.pods} == before


def test_a_new_service_leads_to_its_routers_at_once() -> None:
    world = World(ROUTER)
    decision = world.reconcile()
    assert selected(world) == ROUTERS and world.children.keys() >= OF_ROUTER
    assert decision.status.router is not None and decision.status.router.model_dump() == {"replicas": 2, "ready": 0}
    (secret,) = [made for made in decision.create if made["kind"] == "Secret" and "router" in made["metadata"]["name"]]
    assert decoded(secret["data"]["token"]) == router_token(TOKEN.encode()).decode() != TOKEN
    (volume, *_) = world.children["Deployment", "chat-router"]["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    world.settle()
    assert world.status.router is not None and world.status.router.ready == 2


def test_a_service_that_serves_leads_to_routers_when_one_is_ready_and_not_before() -> None:
    world = settled({})
    world.edit(ROUTER)
    world.reconcile()
    assert selected(world) == AGENTS and world.children.keys() >= OF_ROUTER
    assert world.condition("Ready") == ("False", "Progressing")
    assert world.message() == "1 of 1 groups serve; none of 2 routers is ready"
    world.children["Deployment", "chat-router"]["status"] = {
        "observedGeneration": 1,
        "replicas": 2,
        "updatedReplicas": 2,
        "readyReplicas": 1,
    }
    world.reconcile()
    assert selected(world) == ROUTERS and world.condition("Ready") == ("True", "Serving")
    world.children["Deployment", "chat-router"]["status"] = {}
    world.reconcile()
    assert selected(world) == ROUTERS and world.condition("Ready") == ("False", "Progressing")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "0 of 2 routers run the present spec, 2 older ones remain"),
        (
            {"observedGeneration": 2, "replicas": 3, "updatedReplicas": 1},
            "1 of 2 routers run the present spec, 2 older ones remain",
        ),
        (
            {"observedGeneration": 2, "replicas": 3, "updatedReplicas": 2},
            "2 of 2 routers run the present spec, 1 older ones remain",
        ),
        ({"observedGeneration": 2, "updatedReplicas": 2}, ""),
        ({"observedGeneration": 2, "replicas": 5, "updatedReplicas": 5}, ""),  # scaled by hand
    ],
)
def test_a_service_is_ready_when_all_routers_run_its_spec(status: dict[str, Any], said: str) -> None:
    world = settled(ROUTER)
    world.edit({"router": {"hold": {"seconds": 7}}})
    assert conditions_of(world.decide().status)["Ready"] == ("False", "RollingOut"), "before it is applied"
    world.reconcile()
    live = world.children["Deployment", "chat-router"]
    live["status"] |= status
    world.reconcile()
    assert world.condition("Ready") == (("False", "RollingOut") if said else ("True", "Serving"))
    assert world.condition("Available")[0] == "True"
    assert said in world.message()


@pytest.mark.parametrize(
    "condition",
    [
        {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: pods"},
        {"type": "Progressing", "status": "False", "message": "ReplicaSet has timed out progressing"},
    ],
)
def test_routers_that_do_not_come_are_named_with_the_cause(condition: dict[str, str]) -> None:
    world = settled(ROUTER)
    world.edit({"router": {"replicas": 3}})
    world.reconcile()
    world.children["Deployment", "chat-router"]["status"]["conditions"] = [condition]
    world.reconcile()
    assert world.condition("Ready") == ("False", "RollingOut") and world.message().endswith(condition["message"])


def test_routers_whose_deployment_somebody_paused_are_named() -> None:
    world = settled(ROUTER)
    world.children["Deployment", "chat-router"]["spec"]["paused"] = True
    world.reconcile()
    assert world.condition("Ready") == ("True", "Serving"), "nothing waits for it"
    world.edit({"router": {"hold": {"seconds": 7}}})
    world.reconcile()
    live = world.children["Deployment", "chat-router"]
    live["spec"]["paused"] = True  # which a server-side apply leaves
    live["status"]["updatedReplicas"] = 0
    world.reconcile()
    cause = "the Deployment chat-router is paused: kubectl rollout resume deployment chat-router"
    assert world.condition("Ready") == ("False", "RollingOut") and world.message().endswith(cause)


def test_without_routers_again_the_service_leads_back_before_they_go() -> None:
    world = settled(ROUTER)
    world.tick(HANDOVER_SECONDS)
    world.edit({"router": None})
    assert not world.reconcile().delete and selected(world) == ROUTERS, "agents are to be open to all first"
    world.tick(OPEN_SECONDS)
    decision = world.decide()
    assert {(gone.kind, gone.name) for gone in decision.delete} == OF_ROUTER
    for writes in range(30):  # killed after any number of writes, the operator leaves no Service that leads nowhere
        world.reconcile(writes)
        assert ("Deployment", "chat-router") in world.children or selected(world) == AGENTS
    assert not OF_ROUTER & world.children.keys() and world.status.router is None


def test_routers_in_which_requests_wait_go_once_a_group_serves() -> None:
    world = settled({"router": {}, "scaling": {"idleSeconds": 60}})
    assert world.condition("Ready") == ("False", "Idle")
    world.ask(3)
    world.edit({"router": None, "scaling": {"idleSeconds": None}})
    for _ in range(30):
        world.reconcile()
        assert selected(world) == ROUTERS and world.children.keys() >= OF_ROUTER
        assert answers_routers_alone(world.observe()) is True
        world.tick()
        if not world.open:
            break
    assert world.answered == 3
    world.reconcile()
    decision = world.reconcile()
    assert not decision.delete and decision.requeue_after is not None and decision.requeue_after <= HANDOVER_SECONDS + 1
    world.settle()
    assert not OF_ROUTER & world.children.keys() and selected(world) == AGENTS
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("change", [{"suspend": True}, {"replicas": 0}])
def test_routers_of_a_service_that_is_to_have_no_group_go_at_once(change: dict[str, Any]) -> None:
    world = settled({"router": {}, "scaling": {"idleSeconds": 60}})
    world.edit({"router": None, "scaling": {"idleSeconds": None}} | change)
    world.reconcile()
    assert not OF_ROUTER & world.children.keys()


def test_routers_that_are_not_ready_go_at_once() -> None:
    world = settled({"router": {}, "scaling": {"idleSeconds": 60}})
    world.children["Deployment", "chat-router"]["status"] = {}
    world.edit({"router": None, "scaling": {"idleSeconds": None}})
    world.reconcile()
    assert not OF_ROUTER & world.children.keys()


def test_the_reason_why_no_router_is_created_is_said() -> None:
    world = settled(ROUTER)
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: pods"}
    world.children["Deployment", "chat-router"]["status"] = {"conditions": [refused]}
    world.reconcile()
    assert world.message().endswith("none of 2 routers is ready; exceeded quota: pods")


def test_routers_stay_at_no_groups_and_while_a_spec_is_refused() -> None:
    world = settled(ROUTER)
    world.edit({"replicas": 0})
    world.settle()
    assert world.children.keys() >= OF_ROUTER and world.condition("Ready")[1] == "ScaledToZero"
    world.edit({"engine": {"extraArgs": {"no_such": 1}}})
    world.reconcile()
    assert world.children.keys() >= OF_ROUTER and conditions_of(world.status)["Stalled"] == ("True", "InvalidSpec")
    assert world.status.router is not None and world.status.router.ready == 2


def test_policies_budget_and_selectors_are_of_routers_alone() -> None:
    backends = of_router(ROUTER, "Service")["spec"]
    assert backends["clusterIP"] == "None" and backends["publishNotReadyAddresses"] and backends["selector"] == AGENTS
    deployment = of_router({"router": {"replicas": 5}}, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["replicas"] == 5 and deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert deployment["selector"]["matchLabels"] == ROUTERS and ROUTERS.items() <= labels.items()
    assert not AGENTS.keys() & labels.keys() and labels["app.kubernetes.io/component"] == "router"
    assert of_router(ROUTER, "PodDisruptionBudget")["spec"]["selector"] == {"matchLabels": ROUTERS}
    assert of_router(ROUTER, "NetworkPolicy")["spec"]["podSelector"] == {"matchLabels": ROUTERS}


def test_agents_and_routers_are_scraped() -> None:
    decision = plan(make_observed(make_spec(ROUTER), settings=replace(SETTINGS, service_monitors=True)))
    (monitor,) = [made for made in decision.apply if made["kind"] == "ServiceMonitor"]
    (roles,) = monitor["spec"]["selector"]["matchExpressions"]
    services = [made["metadata"] for made in decision.apply if made["kind"] == "Service"]
    found = {one["name"] for one in services if one["labels"].get(roles["key"]) in roles["values"]}
    assert found == {"chat", "chat-backends"}


def test_pods_are_restricted_small_and_spread() -> None:
    settings = replace(SETTINGS, router_image="starling-operator:1", router_image_pull_policy="Always")
    pod = of_router(ROUTER, "Deployment", settings)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("starling-operator:1", "Always")
    (usual,) = of_router(ROUTER, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert usual["imagePullPolicy"] == SETTINGS.image_pull_policy
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False and pod["terminationGracePeriodSeconds"] == 140
    assert container["securityContext"]["readOnlyRootFilesystem"] and container["securityContext"]["capabilities"] == {
        "drop": ["ALL"]
    }
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")} == {"/health"}
    assert container["resources"] == {"requests": {"cpu": "250m", "memory": "512Mi"}}
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    limited = {"router": {"resources": {"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}}}}
    (container,) = of_router(limited, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == SETTINGS.agent_image
    assert container["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (ROUTER, "--backends-service=chat-backends.prod.svc.cluster.local."),
        (
            {"router": {"hold": {"bytes": "1Mi", "requests": 5, "seconds": 7}}},
            "--hold-bytes=1048576 --hold-requests=5 --hold-seconds=7",
        ),
        ({"router": {"policy": {"prefix": 0.5, "load": 2}}}, "--prefix-weight=0.5 --load-weight=2 --session-weight=1"),
        (ROUTER | {"drain": {"acceptSeconds": 1, "seconds": 9}}, "--accept-seconds=1 --drain-seconds=9"),
        (ROUTER | {"endpoint": {"limits": {"maxBodyBytes": "1Ki"}}}, "--max-body-bytes=1024"),
        (ROUTER | {"endpoint": {"allowedHosts": ["a.b"]}}, "--allowed-hosts=a.b --allowed-hosts=chat"),
        (ROUTER | {"endpoint": {"allowedOrigins": ["https://a.b"]}}, "--allowed-origins=https://a.b"),
        (ROUTER | {"endpoint": {"apiKeySecret": {"name": "s", "key": "k"}}}, "--api-key-file=/etc/starling-keys/k"),
    ],
)
def test_fields_become_flags(changes: dict[str, Any], wanted: str) -> None:
    assert set(wanted.split()) <= set(arguments(changes))


def test_the_command_knows_all_flags() -> None:
    known = {flag for option in get_command(app).commands["router"].params for flag in option.opts}
    secret = {"apiKeySecret": {"name": "s", "key": "k"}}
    given = [*arguments(ROUTER | {"endpoint": {"allowedHosts": ["a.b"], "allowedOrigins": ["*"], **secret}}), *arguments(SHARED)]
    assert {re.split("=", flag)[0] for flag in given} <= known


def test_routers_run_where_the_spec_says() -> None:
    placed = {
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "ai", "effect": "NoSchedule"}],
        "priorityClassName": "high",
    }
    pod = of_router({"router": placed}, "Deployment")["spec"]["template"]["spec"]
    assert {name: pod[name] for name in placed} == placed
    assert not placed.keys() & of_router(ROUTER, "Deployment")["spec"]["template"]["spec"].keys()
    assert spec_hash(make_spec({"router": placed})) == spec_hash(make_spec()), "no group restarts"


def test_tenants_and_their_keys_are_files_of_routers(tmp_path: Path) -> None:
    template = of_router(SHARED, "Deployment")["spec"]["template"]
    assert {"--tenants-file=/etc/starling-tenants/tenants.yaml", "--routers=2"} <= set(arguments(SHARED))
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "tenants"]
    (mount,) = [one for one in template["spec"]["containers"][0]["volumeMounts"] if one["name"] == "tenants"]
    assert mount["mountPath"] == "/etc/starling-tenants" and mount["readOnly"]
    of_pod, secret = volume["projected"]["sources"]
    (item,) = of_pod["downwardAPI"]["items"]
    assert item["path"] == "tenants.yaml" and TENANTS in item["fieldRef"]["fieldPath"]
    assert secret["secret"] == {
        "name": "starling-api-keys",
        "items": [{"key": "chat", "path": "keys/chat"}, {"key": "batch", "path": "keys/batch"}],
        "optional": True,
    }
    text = template["metadata"]["annotations"][TENANTS]
    assert json.loads(text) == [CHAT, BATCH], "what is not said is the router's own default"
    (tmp_path / "tenants.yaml").write_text(text)
    assert read_tenants(tmp_path / "tenants.yaml") == [
        Tenant("chat", priority=1, keys="chat"),
        Tenant("batch", weight=0.5, tokens_per_minute=1000, concurrent=2, keys="batch"),
    ]


def test_a_router_that_starts_finds_the_canary_in_a_file_if_one_runs() -> None:
    (volume,) = [one for one in of_router(ROUTER, "Deployment")["spec"]["template"]["spec"]["volumes"] if one["name"] == "canary"]
    assert volume["configMap"] == {"name": "chat-router", "optional": True}
    assert "--canary-file=/etc/starling-canary/canary.json" in arguments(ROUTER)


def test_without_tenants_routers_have_no_file_of_them() -> None:
    template = of_router(ROUTER, "Deployment")["spec"]["template"]
    assert [one["name"] for one in template["spec"]["volumes"]] == ["token", "canary"] and "annotations" not in template["metadata"]
    assert not [flag for flag in arguments(ROUTER) if "tenant" in flag or "routers" in flag]


def test_other_tenants_are_no_other_revision_but_the_first_ones_are() -> None:
    """Agents of a service with tenants know no key, and are closed from their first moment to all but routers."""
    other = {"router": {"tenants": [BATCH | {"weight": 9}], "tenantKeysSecret": "others", "replicas": 3}}
    assert spec_hash(make_spec(SHARED)) == spec_hash(make_spec(other)) != spec_hash(make_spec(ROUTER))
    assert [json.loads(agent_json(changes))["endpoint"]["routers_only"] for changes in (SHARED, ROUTER)] == [True, False]


def agent_json(changes: dict[str, Any]) -> str:
    decision = plan(make_observed(make_spec(changes)))
    return next(made["data"]["agent.json"] for made in decision.create if made["kind"] == "ConfigMap")


def test_with_tenants_agents_answer_routers_alone_also_while_none_is_ready() -> None:
    world = settled({})
    assert answers_routers_alone(world.observe()) is False
    world.edit(SHARED)
    assert answers_routers_alone(world.observe()) is True
    world.settle()
    world.edit({"router": None})
    world.settle()
    assert answers_routers_alone(world.observe()) is False
    assert answers_routers_alone(make_observed(service=make_service(spec_error="?", spec=None))) is None, "they stay as they are"
