"""spec.endpoint.route: an HTTPRoute to the Service, or to an InferencePool for which routers pick."""

from typing import Any

import pytest
from starling_cli.main import app
from starling_operator.plan.gateway import HANDOVER_SECONDS
from starling_operator.plan.observed import Manifest
from starling_operator.plan.revision import spec_hash
from starling_operator.plan.router import answers_routers_alone
from typer.main import get_command

from tests.operator.plan.building import make_spec, merged
from tests.operator.plan.world import World

PARENT = {"parentRefs": [{"name": "edge"}]}
ROUTE: dict[str, Any] = {"endpoint": {"route": PARENT}}
POOL: dict[str, Any] = {"router": {}, "endpoint": {"route": PARENT | {"backend": "InferencePool"}}}
OPEN = merged(POOL, {"endpoint": {"route": {"failureMode": "FailOpen"}}})
TO_SERVICE = [{"kind": "Service", "name": "chat", "port": 80}]
TO_POOL = [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "chat"}]
AGENTS = {"serving.starling.dev/service": "chat", "serving.starling.dev/role": "serving"}
OF_POOL = {("InferencePool", "chat"), ("Service", "chat-router")}


def made(changes: dict[str, Any], kind: str, name: str = "chat") -> Manifest:
    world = World(changes)
    world.reconcile()
    applied = world.decide().apply
    return next(each["spec"] for each in applied if (each["kind"], each["metadata"]["name"]) == (kind, name))


def backends(world: World) -> list[dict[str, Any]]:
    (rule,) = world.children["HTTPRoute", "chat"]["spec"]["rules"]
    found: list[dict[str, Any]] = rule["backendRefs"]
    return found


def settled(changes: dict[str, Any]) -> World:
    world = World(changes)
    world.settle()
    return world


@pytest.mark.parametrize(
    "route",
    [
        PARENT,
        {
            "parentRefs": [
                {"group": "", "kind": "Service", "namespace": "edge", "name": "a", "sectionName": "tls", "port": 443},
                {"name": "b"},
            ]
        },
        {**PARENT, "hostnames": ["chat.example.org", "*.example.org"]},
    ],
)
def test_the_route_hangs_where_the_spec_says(route: dict[str, Any]) -> None:
    rules = made({"endpoint": {"route": PARENT, "port": 8080}}, "HTTPRoute")["rules"]
    assert made({"endpoint": {"route": route, "port": 8080}}, "HTTPRoute") == {**route, "rules": rules}
    assert rules[0]["backendRefs"] == [{"kind": "Service", "name": "chat", "port": 8080}]
    assert rules[0]["timeouts"] == {"request": "0s"}, "no gateway ends a stream for its length"


def test_timeouts_are_the_spec_s() -> None:
    timeouts = {"request": "1h30m", "backendRequest": "10m"}
    assert made({"endpoint": {"route": PARENT | {"timeouts": timeouts}}}, "HTTPRoute")["rules"][0]["timeouts"] == timeouts


def test_a_route_goes_when_none_is_asked_for() -> None:
    world = settled(ROUTE)
    assert backends(world) == TO_SERVICE
    world.edit({"endpoint": {"route": None}})
    assert [deletion.kind for deletion in world.decide().delete] == ["HTTPRoute"]
    world.settle()
    assert ("HTTPRoute", "chat") not in world.children


@pytest.mark.parametrize("mode", ["FailClose", "FailOpen"])
def test_the_pool_has_all_agents_and_names_the_routers_port(mode: str) -> None:
    pool = made(OPEN if mode == "FailOpen" else POOL, "InferencePool")
    assert pool == {
        "selector": {"matchLabels": AGENTS},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "chat-router", "port": {"number": 9002}, "failureMode": mode},
    }
    assert pool["selector"]["matchLabels"] == made(POOL, "Service", "chat-backends")["selector"], "whom routers pick of"
    picker = made(POOL, "Service", "chat-router")
    (port,) = picker["ports"]
    assert port == {"name": "grpc-ext-proc", "port": 9002, "targetPort": 9002, "protocol": "TCP"}
    assert picker["selector"] == {"serving.starling.dev/router": "chat"}


def test_routers_pick_where_a_pool_asks_them_and_nowhere_else() -> None:
    (picks,), (plain,) = (
        made(changes, "Deployment", "chat-router")["template"]["spec"]["containers"] for changes in (POOL, {"router": {}})
    )
    more = set(picks["command"]) - set(plain["command"])
    assert more == {"--epp-port=9002", "--epp-health-port=9003"}
    assert {flag.split("=")[0] for flag in more} <= {
        flag for option in get_command(app).commands["router"].params for flag in option.opts
    }
    assert [port["containerPort"] for port in picks["ports"]] == [8000, 9002, 9003]
    assert [port["containerPort"] for port in plain["ports"]] == [8000]


def test_a_gateway_may_ask_in_plain_text_and_a_pool_that_is_left_stays_so() -> None:
    world = settled(merged(POOL, {"endpoint": {"route": {"secureServing": False}}}))

    def is_plain() -> bool:
        (router,) = world.children["Deployment", "chat-router"]["spec"]["template"]["spec"]["containers"]
        (port,) = world.children["Service", "chat-router"]["spec"]["ports"]
        assert "--epp-port=9002" in router["command"]
        assert ("--no-epp-secure-serving" in router["command"]) is (port.get("appProtocol") == "kubernetes.io/h2c")
        return "appProtocol" in port

    assert is_plain()
    world.edit({"endpoint": {"route": {"backend": "Service", "secureServing": True}}})
    world.reconcile()
    assert world.children.keys() >= OF_POOL and is_plain()
    world.edit({"endpoint": {"route": {"backend": "InferencePool"}}})
    world.reconcile()
    assert not is_plain()


@pytest.mark.parametrize(
    ("route", "peers"),
    [
        ({}, [("prod", {"gateway.networking.k8s.io/gateway-name": "edge"})]),
        (
            {"parentRefs": [{"name": "a", "namespace": "infra"}, {"name": "mesh", "kind": "Service", "group": ""}]},
            [("infra", {"gateway.networking.k8s.io/gateway-name": "a"})],
        ),
        (
            {"proxies": [{"namespace": "envoy"}, {"labels": {"app": "edge"}}, {"cidr": "10.0.0.0/24"}]},
            [("envoy", None), ("prod", {"app": "edge"}), "10.0.0.0/24"],
        ),
    ],
)
def test_only_the_gateway_s_proxies_may_ask_for_picks(route: dict[str, Any], peers: list[Any]) -> None:
    to_all, to_few = made(merged(POOL, {"endpoint": {"route": route}}), "NetworkPolicy", "chat-router")["ingress"]
    assert to_all == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert [port["port"] for port in to_few["ports"]] == [9002, 9003]
    assert [
        peer["ipBlock"]["cidr"]
        if "ipBlock" in peer
        else (
            peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"],
            peer["podSelector"].get("matchLabels"),
        )
        for peer in to_few["from"]
    ] == peers


def test_where_nobody_knows_the_proxies_the_port_stays_closed() -> None:
    """A rule with an empty list of peers would let all in."""
    mesh = merged(POOL, {"endpoint": {"route": {"parentRefs": [{"name": "mesh", "kind": "Service", "group": ""}]}}})
    for changes in (mesh, {"router": {}}):
        assert made(changes, "NetworkPolicy", "chat-router")["ingress"] == [{"ports": [{"port": 8000, "protocol": "TCP"}]}]


def test_routers_do_not_pick_before_their_port_is_guarded() -> None:
    """A NetworkPolicy that the API server refuses would leave the port open to all."""
    world = settled(ROUTE | {"router": {}})
    before, routers = world.children["NetworkPolicy", "chat-router"], world.children["Deployment", "chat-router"]
    for policy in (before, None):
        world.edit(POOL)
        world.reconcile()
        world.children["Deployment", "chat-router"] = routers
        if policy is None:
            del world.children["NetworkPolicy", "chat-router"]
        else:
            world.children["NetworkPolicy", "chat-router"] = policy
        assert "Deployment" not in [each["kind"] for each in world.decide().apply]
    world.settle()
    assert picks(world)


def picks(world: World) -> bool:
    """Says whether routers have the port for picks, and the NetworkPolicy lets the Gateway's proxies alone reach it."""
    (container,) = world.children["Deployment", "chat-router"]["spec"]["template"]["spec"]["containers"]
    few = [rule for rule in world.children["NetworkPolicy", "chat-router"]["spec"]["ingress"] if "from" in rule]
    return "--epp-port=9002" in container["command"] and [port["port"] for rule in few for port in rule["ports"]] == [9002, 9003]


def test_containers_that_a_webhook_adds_are_none_of_ours() -> None:
    world = settled(ROUTE | {"router": {}})
    world.edit(POOL)
    for _ in range(2):
        world.reconcile()
    live = world.children["Deployment", "chat-router"]
    live["spec"]["template"]["spec"]["containers"] += [{"name": "proxy", "ports": [{"containerPort": 15090}]}, {"name": "bare"}]
    seen = {"observedGeneration": live["metadata"]["generation"]}
    live["status"] = seen | {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}
    world.reconcile()
    assert backends(world) == TO_POOL


def test_the_route_leads_to_the_pool_once_all_routers_pick_and_stays() -> None:
    world = settled(ROUTE | {"router": {}})
    before = {pod.uid for pod in world.pods}
    deployment = world.children["Deployment", "chat-router"]
    deployment["metadata"]["generation"], deployment["status"] = 1, {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2}
    world.edit(POOL)
    world.reconcile()
    assert world.children.keys() >= OF_POOL and backends(world) == TO_SERVICE
    deployment = world.children["Deployment", "chat-router"]
    for status, expected in (
        ({"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}, TO_SERVICE),  # not seen yet
        ({"observedGeneration": 2, "replicas": 3, "updatedReplicas": 2, "readyReplicas": 3}, TO_SERVICE),  # an old one runs
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2}, TO_SERVICE),
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 1}, TO_POOL),
        ({"observedGeneration": 2, "replicas": 3, "updatedReplicas": 1}, TO_POOL),  # some router will pick again
    ):
        world.children["Deployment", "chat-router"]["metadata"]["generation"] = 2
        world.children["Deployment", "chat-router"]["status"] = status
        world.reconcile()
        assert backends(world) == expected, status
    assert {pod.uid for pod in world.pods} == before and spec_hash(make_spec(POOL)) == spec_hash(make_spec())


def test_the_route_waits_for_routers_that_a_quota_or_a_webhook_keeps_as_they_were() -> None:
    world = settled(ROUTE | {"router": {}})
    before = world.children["Deployment", "chat-router"]
    world.edit(POOL)
    world.reconcile()
    world.children["Deployment", "chat-router"] = before
    (route,) = [made for made in world.decide().apply if made["kind"] == "HTTPRoute"]
    assert ("InferencePool", "chat") in world.children and route["spec"]["rules"][0]["backendRefs"] == TO_SERVICE


def test_without_a_pool_the_route_leads_to_the_service() -> None:
    """Its CRD may be missing, and go: then the API server has the object no longer, and neither has the cache."""
    world = settled(POOL)
    assert backends(world) == TO_POOL
    del world.children["InferencePool", "chat"]
    world.reconcile(0)
    assert [made["spec"]["rules"][0]["backendRefs"] for made in world.decide().apply if made["kind"] == "HTTPRoute"] == [TO_SERVICE]


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": {"route": {"backend": "Service"}}},
        {"endpoint": {"route": None}},
        {"endpoint": {"route": {"backend": "Service"}}, "router": None},
    ],
)
def test_a_pool_goes_when_gateways_have_followed_the_route_elsewhere(changes: dict[str, Any]) -> None:
    world = settled(POOL)
    assert world.children.keys() >= OF_POOL
    world.edit(changes)
    for writes in range(30):
        world.reconcile(writes)
        assert world.children.keys() >= OF_POOL and picks(world)
    assert ("HTTPRoute", "chat") not in world.children or backends(world) == TO_SERVICE
    left, due = world.now, world.decide().requeue_after
    assert due is not None and due <= HANDOVER_SECONDS + 1
    world.tick(HANDOVER_SECONDS - 2)
    world.reconcile()
    assert world.children.keys() >= OF_POOL and picks(world)
    world.settle()
    assert world.now >= left + HANDOVER_SECONDS - 1
    assert not OF_POOL & world.children.keys()
    assert ("Deployment", "chat-router") not in world.children if "router" in changes else not picks(world)
    assert (("HTTPRoute", "chat") in world.children) is (changes["endpoint"]["route"] is not None)


def test_agents_check_keys_themselves_where_a_gateway_fails_open() -> None:
    """Its requests have no router's token then. While it fails closed they have, and agents need to answer nobody else."""
    assert answers_routers_alone(settled(POOL).observe()) is True
    assert answers_routers_alone(settled(OPEN).observe()) is False
