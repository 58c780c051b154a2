"""The children that a service has once, whatever its groups."""

from starling_agent.contract.config import ADMIN_PORT, ENDPOINT_PORT
from starling_crds.v1alpha1.route import RouteSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels, names
from starling_operator.plan.decision import Delete
from starling_operator.plan.manifest import child
from starling_operator.plan.observed import Manifest, Observed, Service, Settings

_PORT_NAME = "http"
_PODS_PORT_NAME = "pods"
_ROUTE = "HTTPRoute"
_STORE_PORTS = {"port": 15000, "endPort": 17000, "protocol": "TCP"}
"""Among which Mooncake's transfer engine takes free ones."""


def service_children(service: Service, spec: InferenceServiceSpec, settings: Settings) -> tuple[Manifest, ...]:
    """In the order in which they are applied."""
    always = (
        service_account(service),
        endpoint_service(service, spec),
        network_policy(service, spec, settings),
    )
    monitor = (service_monitor(service, spec),) if settings.service_monitors else ()
    route = (http_route(service, spec, spec.endpoint.route),) if spec.endpoint.route is not None else ()
    return (*always, *monitor, *route)


def service_account(service: Service) -> Manifest:
    """The pods' identity: without a token, and bound to no role."""
    return child(service, "v1", "ServiceAccount", names.service_account(service.name)) | {"automountServiceAccountToken": False}


def endpoint_service(service: Service, spec: InferenceServiceSpec) -> Manifest:
    """What clients see: ready pods of all groups.

    The pods' own port is there too, whatever `spec.endpoint.port` is: agents prove the Service through it, and must not be
    restarted for another port.
    """
    ports = [_service_port(_PORT_NAME, spec.endpoint.port)]
    if spec.endpoint.port != ENDPOINT_PORT:
        ports.append(_service_port(_PODS_PORT_NAME, ENDPOINT_PORT))
    made = child(service, "v1", "Service", service.name)
    # The label tells a ServiceMonitor this Service from the groups' headless ones.
    made["metadata"]["labels"][labels.ROLE] = labels.SERVING
    return made | {"spec": {"type": "ClusterIP", "selector": labels.serving_selector(service), "ports": ports}}


def _service_port(name: str, port: int) -> dict[str, object]:
    return {"name": name, "port": port, "targetPort": ENDPOINT_PORT, "protocol": "TCP"}


def network_policy(service: Service, spec: InferenceServiceSpec, settings: Settings) -> Manifest:
    """The endpoint is open to all; everything else to the service's own pods, and the admin port to the operator.

    Pods that use a store read from each other's memory: agents of the same namespace reach the ports that it is offered at. What a
    label of a pod says is proof of nothing in somebody else's namespace.
    """
    own = {labels.SERVICE: service.name}
    offered = {"from": [{"podSelector": {"matchLabels": labels.AGENTS}}], "ports": [_STORE_PORTS]}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    return child(service, "networking.k8s.io/v1", "NetworkPolicy", service.name) | {
        "spec": {
            "podSelector": {"matchLabels": own},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": ENDPOINT_PORT, "protocol": "TCP"}]},
                {"from": [{"podSelector": {"matchLabels": own}}]},
                {"from": [operator], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
                *([offered] if spec.kv_cache.store is not None else []),
            ],
        }
    }


def service_monitor(service: Service, spec: InferenceServiceSpec) -> Manifest:
    """Prometheus scrapes each pod through the Service; /metrics is open without a key."""
    endpoint: dict[str, object] = {"port": _PORT_NAME, "path": "/metrics", "interval": "15s"}
    if spec.endpoint.tls_secret is not None:
        # Pods are scraped by address, which no certificate names.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return child(service, "monitoring.coreos.com/v1", "ServiceMonitor", service.name) | {
        "spec": {"selector": {"matchLabels": labels.serving_selector(service)}, "endpoints": [endpoint]}
    }


def http_route(service: Service, spec: InferenceServiceSpec, route: RouteSpec) -> Manifest:
    """Leads all paths to the Service. Where a route says nothing of a request's time, gateways end streams after 15 to 60 s."""
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"kind": "Service", "name": service.name, "port": spec.endpoint.port}],
        "timeouts": {"request": "0s"},
    }
    asked = route.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return child(service, "gateway.networking.k8s.io/v1", _ROUTE, service.name) | {"spec": {**asked, "rules": [rule]}}


def route_deletion(observed: Observed) -> tuple[Delete, ...]:
    """Of one that is not asked for any more."""
    live, spec = observed.children.get((_ROUTE, observed.service.name)), observed.service.spec
    if live is None or spec is None or spec.endpoint.route is not None:
        return ()
    return (Delete(_ROUTE, observed.service.name, live["metadata"].get("uid", ""), why="spec.endpoint.route is gone"),)
