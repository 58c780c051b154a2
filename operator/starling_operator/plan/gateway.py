"""A Gateway's way to a service with `spec.endpoint.route`: an HTTPRoute to its Service, or to an InferencePool.

The pool has all agents, and routers pick one for each request, by their port for it. The route leads there once the pool exists and
all routers that run pick; before that, and where the cluster has no such pools, it leads to the Service. A Gateway follows a route
late: a pool that the spec no longer has stays, with the port that picks for it, until nothing has led there for HANDOVER_SECONDS.
So no request is refused.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starling_agent.contract.config import ENDPOINT_PORT
from starling_crds.v1alpha1.route import GATEWAYS, GatewayProxies, ParentReference, RouteSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels, names
from starling_operator.plan.decision import Delete, deletion
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed, Service
from starling_operator.plan.timestamps import read_time, rfc3339

PICK_PORT, PICK_HEALTH_PORT = 9002, 9003
PICK_PORT_NAME = "grpc-ext-proc"
"""Istio knows gRPC's ports by the beginning of their names. Inference Extension's own pickers have this one."""
PLAIN_HTTP2 = "kubernetes.io/h2c"
_ROUTE, _POOL = "HTTPRoute", "InferencePool"
_POOLS = "inference.networking.k8s.io"
_PROXY_OF = f"{GATEWAYS}/gateway-name"
"""Label of a Gateway's pods (GEP-1762)."""
HANDOVER_SECONDS = 30.0
"""Gateways have so long to follow a route that leads to the pool no longer."""
LEFT_AT = "serving.starling.dev/left-at"
"""Annotation of the routers' Service for picks: since when no route of ours has led to the pool that the spec no longer has."""
_NAMESPACE = "kubernetes.io/metadata.name"


def gateway_children(observed: Observed, spec: InferenceServiceSpec) -> tuple[Manifest, ...]:
    """Children that only a service with a route has, in the order in which they are applied."""
    service, route = observed.service, spec.endpoint.route
    if not _is_known(observed, spec):
        return ()
    if route is None:
        return _left_pool(observed, spec)
    if spec.has_pool:
        of_pool: tuple[Manifest, ...] = picker_service(service, pick_port(observed, spec)), inference_pool(service, route)
    else:
        of_pool = _left_pool(observed, spec)
    return (*of_pool, http_route(service, spec, route, to_pool=leads_to_pool(observed)))


def picks(observed: Observed, spec: InferenceServiceSpec) -> bool:
    """Says whether routers have the port where they pick."""
    return spec.has_pool or seconds_of_pool(observed) > 0


@dataclass(frozen=True, slots=True)
class PickPort:
    """The port where routers pick for a Gateway, beside the one where kubelets probe it."""

    secure: bool

    def arguments(self) -> list[str]:
        """Returns the router's arguments."""
        plain = [] if self.secure else ["--no-epp-secure-serving"]
        return [f"--epp-port={PICK_PORT}", f"--epp-health-port={PICK_HEALTH_PORT}", *plain]

    def container_ports(self) -> list[dict[str, Any]]:
        return [
            {"name": PICK_PORT_NAME, "containerPort": PICK_PORT, "protocol": "TCP"},
            {"name": "grpc-health", "containerPort": PICK_HEALTH_PORT, "protocol": "TCP"},
        ]


def pick_port(observed: Observed, spec: InferenceServiceSpec) -> PickPort:
    """Returns the port of routers that pick. That of a pool which only stays is left as it is."""
    route, picker = spec.endpoint.route, observed.live("Service", names.router(observed.service.name))
    if route is not None and spec.has_pool:
        return PickPort(route.secure_serving)
    ports = picker["spec"].get("ports") or () if picker is not None else ()
    return PickPort(all(port.get("appProtocol") != PLAIN_HTTP2 for port in ports))


def seconds_of_pool(observed: Observed) -> float:
    """Returns for how long a pool stays that the spec no longer has: infinitely while the route may lead there."""
    spec, picker = observed.service.spec, observed.live("Service", names.router(observed.service.name))
    if spec is None or spec.has_pool or picker is None:
        return 0.0
    route = observed.live(_ROUTE, observed.service.name)
    if _ROUTE in observed.unlisted or (route is not None and _is_at_pool(route)):
        return math.inf
    left_at = _left_at(picker)
    return HANDOVER_SECONDS if left_at is None else max(0.0, read_time(left_at) + HANDOVER_SECONDS - observed.now)


def _left_pool(observed: Observed, spec: InferenceServiceSpec) -> tuple[Manifest, ...]:
    """The Service that keeps the time, while a pool stays to which nothing leads."""
    if not 0 < seconds_of_pool(observed) < math.inf:
        return ()
    left_at = _left_at(observed.children["Service", names.router(observed.service.name)])
    made = picker_service(observed.service, pick_port(observed, spec))
    made["metadata"]["annotations"] = {LEFT_AT: left_at or rfc3339(observed.now)}
    return (made,)


def _left_at(picker: Manifest) -> str | None:
    found: str | None = (picker["metadata"].get("annotations") or {}).get(LEFT_AT)
    return found


def gateway_deletions(observed: Observed) -> Iterator[Delete]:
    """Deletes what the spec no longer asks for: the route first, and its pool when Gateways have followed."""
    service, spec = observed.service.name, observed.service.spec
    if spec is None:
        return
    gone = [(_ROUTE, service, "spec.endpoint.route is gone")] if spec.endpoint.route is None else []
    if not picks(observed, spec):
        why = "spec.endpoint.route asks for no InferencePool"
        gone += [(_POOL, service, why), ("Service", names.router(service), why)]
    for kind, name, why in gone:
        yield from deletion(observed, kind, name, why)


def leads_to_pool(observed: Observed) -> bool:
    """Says whether the route leads to the pool. It stays there while the pool is there: some router will pick again."""
    service, spec = observed.service.name, observed.service.spec
    if spec is None or not spec.has_pool or (_POOL, service) not in observed.children:
        return False
    route, routers = (observed.children.get(key) for key in ((_ROUTE, service), ("Deployment", names.router(service))))
    return (route is not None and _is_at_pool(route)) or (routers is not None and _all_pick(routers))


def _is_known(observed: Observed, spec: InferenceServiceSpec) -> bool:
    """Says whether the live route, and the pool that it may lead to, have been looked for. Until then both stay as they are."""
    return not observed.unlisted & ({_ROUTE, _POOL} if spec.has_pool else {_ROUTE})


def _is_at_pool(route: Manifest) -> bool:
    backends = (ref for rule in route["spec"].get("rules", ()) for ref in rule.get("backendRefs", ()))
    return any(ref.get("kind") == _POOL for ref in backends)


def _all_pick(routers: Manifest) -> bool:
    """Says whether a router is ready, and none runs that was started without the port for gateways."""
    status = routers.get("status") or {}
    containers = routers["spec"]["template"]["spec"]["containers"]  # a webhook may have added some
    has_port = any(port.get("name") == PICK_PORT_NAME for each in containers for port in each.get("ports") or ())
    is_seen = status.get("observedGeneration") == routers["metadata"].get("generation")
    all_new = status.get("updatedReplicas", 0) == status.get("replicas", 0)
    return has_port and is_seen and all_new and status.get("readyReplicas", 0) > 0


def http_route(service: Service, spec: InferenceServiceSpec, route: RouteSpec, *, to_pool: bool) -> Manifest:
    """Leads all paths to the service. Without a word on timeouts, gateways would end streams after 15 to 60 s."""
    to_service = {"kind": "Service", "name": service.name, "port": spec.endpoint.port}
    backend = {"group": _POOLS, "kind": _POOL, "name": service.name} if to_pool else to_service
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [backend],
        "timeouts": route.timeouts.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    fields = route.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, include={"parent_refs", "hostnames"}
    )
    return child(service, f"{GATEWAYS}/v1", _ROUTE, service.name) | {"spec": {**fields, "rules": [rule]}}


def inference_pool(service: Service, route: RouteSpec) -> Manifest:
    """All agents that routers may pick: those that they find by the headless Service."""
    picker = {"name": names.router(service.name), "port": {"number": PICK_PORT}, "failureMode": route.failure_mode}
    return child(service, f"{_POOLS}/v1", _POOL, service.name) | {
        "spec": {
            "selector": {"matchLabels": labels.serving_selector(service)},
            "targetPorts": [{"number": ENDPOINT_PORT}],
            "endpointPickerRef": picker,
        }
    }


def picker_service(service: Service, pick: PickPort) -> Manifest:
    """Names the routers to the Gateway, wherever the Service for clients leads."""
    port = {"name": PICK_PORT_NAME, "port": PICK_PORT, "targetPort": PICK_PORT, "protocol": "TCP"}
    if not pick.secure:
        port["appProtocol"] = PLAIN_HTTP2
    return child(service, "v1", "Service", names.router(service.name)) | {
        "spec": {"type": "ClusterIP", "selector": labels.router_selector(service), "ports": [port]}
    }


def is_port_guarded(observed: Observed, spec: InferenceServiceSpec) -> bool:
    """Says whether the live NetworkPolicy lets the Gateway's proxies alone ask routers to pick. These may open the port then."""
    policy = observed.live("NetworkPolicy", names.router(observed.service.name))
    return policy is not None and (bool(_pick_rules(policy)) or not pick_ingress(observed, spec))


def _pick_rules(policy: Manifest) -> list[dict[str, Any]]:
    rules = policy["spec"].get("ingress") or ()
    return [rule for rule in rules if any(port.get("port") == PICK_PORT for port in rule.get("ports") or ())]


def pick_ingress(observed: Observed, spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Lets the Gateway's proxies, and nobody else, ask routers to pick: the answer has the token that agents believe."""
    service, route = observed.service, spec.endpoint.route
    if route is None or not spec.has_pool:
        live = observed.live("NetworkPolicy", names.router(service.name))
        return _pick_rules(live) if live is not None and picks(observed, spec) else []
    peers = [_peer(service, proxies) for proxies in route.proxies or _usual_proxies(route.parent_refs)]
    ports = [{"port": port, "protocol": "TCP"} for port in (PICK_PORT, PICK_HEALTH_PORT)]
    return [{"from": peers, "ports": ports}] if peers else []  # a rule without peers would be for all


def _usual_proxies(parents: list[ParentReference]) -> list[GatewayProxies]:
    """Proxies of Gateways that run in pods of this cluster. Of other kinds of parents nobody knows them."""
    gateways = (parent for parent in parents if parent.is_gateway)
    return [GatewayProxies(namespace=parent.namespace, labels={_PROXY_OF: parent.name}) for parent in gateways]


def _peer(service: Service, proxies: GatewayProxies) -> dict[str, Any]:
    if proxies.cidr is not None:
        return {"ipBlock": {"cidr": proxies.cidr}}
    return {
        "namespaceSelector": {"matchLabels": {_NAMESPACE: proxies.namespace or service.namespace}},
        "podSelector": {"matchLabels": proxies.labels} if proxies.labels else {},
    }
