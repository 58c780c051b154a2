"""Peers that reach the endpoint of agents: all pods, or behind routers these, a Gateway's proxies and scrapers."""

import math
from dataclasses import replace
from typing import Any

import pytest
from starling_operator.plan.endpoint_policy import OPEN_SECONDS, OPEN_SINCE
from starling_operator.plan.gateway import HANDOVER_SECONDS
from starling_operator.plan.observed import USUAL_SCRAPERS, Manifest

from tests.operator.plan.building import SETTINGS
from tests.operator.plan.world import World, settled

ENDPOINT = {"port": 8000, "protocol": "TCP"}
ROUTER: dict[str, Any] = {"router": {}}
ROUTERS = {"podSelector": {"matchLabels": {"serving.starling.dev/router": "chat"}}}
TO_FEW = [ROUTERS, *USUAL_SCRAPERS]
EDGE = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "prod"}},
    "podSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "edge"}},
}
OUTSIDE = {"cidr": "10.9.0.0/16"}


def pool(**route: Any) -> dict[str, Any]:
    return ROUTER | {"endpoint": {"route": {"parentRefs": [{"name": "edge"}], "backend": "InferencePool", **route}}}


def peers(world: World) -> list[Manifest] | None:
    """Returns who reaches the endpoint; None: all."""
    (rule,) = [rule for rule in world.children["NetworkPolicy", "chat"]["spec"]["ingress"] if ENDPOINT in rule.get("ports", [])]
    found: list[Manifest] | None = rule.get("from")
    return found


def is_led_to_agents(world: World) -> bool:
    return "serving.starling.dev/role" in world.children["Service", "chat"]["spec"]["selector"]


def annotations(world: World) -> dict[str, str]:
    found: dict[str, str] = world.children["NetworkPolicy", "chat"]["metadata"].get("annotations", {})
    return found


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, None),
        (ROUTER, TO_FEW),
        (pool(), [ROUTERS, EDGE, *USUAL_SCRAPERS]),
        (pool(failureMode="FailOpen"), [ROUTERS, EDGE, *USUAL_SCRAPERS]),
        (pool(proxies=[OUTSIDE]), [ROUTERS, {"ipBlock": OUTSIDE}, *USUAL_SCRAPERS]),
        # nobody knows where the requests of such a parent come from
        (pool(parentRefs=[{"group": "", "kind": "Service", "name": "mesh"}]), None),
    ],
)
def test_a_new_service_lets_in_routers_proxies_and_scrapers(changes: dict[str, Any], wanted: list[Manifest] | None) -> None:
    world = World(changes)
    for _ in range(3):
        world.reconcile()
        assert peers(world) == wanted
        assert wanted is None or OPEN_SINCE not in annotations(world)
        world.tick()


def test_scrapers_are_those_of_the_operators_settings() -> None:
    """None of them leaves the routers, for a rule without peers would be for all."""
    world = World(ROUTER, settings=replace(SETTINGS, metrics_from=()))
    world.reconcile()
    assert peers(world) == [ROUTERS]


@pytest.mark.parametrize(("connection_seconds", "seconds"), [(120, 130), (20, 30), (0, 130)])
def test_clients_that_came_to_agents_have_time_to_leave(connection_seconds: int, seconds: int) -> None:
    world = settled({"endpoint": {"limits": {"connectionSeconds": connection_seconds}}})
    world.edit(ROUTER)
    while is_led_to_agents(world):
        world.reconcile()
        assert peers(world) is None
        world.tick()
    led_at = world.now
    while peers(world) is None:
        decision = world.reconcile()
        assert decision.requeue_after is not None or peers(world) is not None, "nothing else may wake the operator"
        world.tick()
    assert led_at + seconds - 2 <= world.now <= led_at + seconds + 3
    assert peers(world) == TO_FEW and OPEN_SINCE not in annotations(world)
    world.settle()
    assert peers(world) == TO_FEW


def test_what_an_older_operator_left_open_is_closed() -> None:
    world = settled(ROUTER)
    policy = world.children["NetworkPolicy", "chat"]["spec"]
    policy["ingress"] = [{"ports": [ENDPOINT]}, *policy["ingress"][1:]]
    world.reconcile()
    assert peers(world) is None
    world.tick(131)
    world.reconcile()
    assert peers(world) == TO_FEW


def test_clients_are_led_to_agents_once_these_are_open_to_all() -> None:
    """An operator that is killed after any number of writes leads nobody to an endpoint that is closed."""
    world = settled(ROUTER)
    world.edit({"router": None})
    opened_at = math.inf
    for writes in range(40):
        world.reconcile(writes % 20)
        opened_at = min(opened_at, world.now) if peers(world) is None else math.inf
        assert not is_led_to_agents(world) or world.now >= opened_at + OPEN_SECONDS - 1
        world.tick(0.5)
    world.settle()
    assert is_led_to_agents(world) and peers(world) is None and ("Deployment", "chat-router") not in world.children
    assert OPEN_SINCE not in annotations(world)


def test_routers_that_come_back_meanwhile_find_agents_as_they_left_them() -> None:
    world = settled(ROUTER)
    world.edit({"router": None})
    world.reconcile()
    world.edit(ROUTER)
    world.reconcile()
    assert not is_led_to_agents(world) and peers(world) is None
    world.settle()
    assert peers(world) == TO_FEW


def test_proxies_come_in_until_gateways_have_followed() -> None:
    world = settled(pool())
    world.edit({"endpoint": {"route": {"backend": "Service"}}})
    began = world.now
    while ("InferencePool", "chat") in world.children:
        assert peers(world) == [ROUTERS, EDGE, *USUAL_SCRAPERS]
        world.reconcile()
        world.tick(HANDOVER_SECONDS / 4)
    assert world.now >= began + HANDOVER_SECONDS
    world.settle()
    assert peers(world) == TO_FEW
