"""Manifests of the children: those of a service, of a revision and of a group."""

from starling_agent.contract.config import ADMIN_PORT, ENDPOINT_PORT
from starling_crds.v1alpha1.route import RouteSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels, names
from starling_operator.plan.admin_token import with_token
from starling_operator.plan.decision import Delete
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed, Service, Settings
from starling_operator.plan.revision import Revision

_PORT_NAME = "http"
_PODS_PORT_NAME = "pods"
_ROUTE = "HTTPRoute"
_STORE_PORTS = {"port": 15000, "endPort": 17000, "protocol": "TCP"}
"""Range from which Mooncake's transfer engine takes free ports."""


def service_children(service: Service, spec: InferenceServiceSpec, settings: Settings) -> tuple[Manifest, ...]:
    """Children that a service has once, in the order in which they are applied."""
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
    """The Service for clients: ready pods of all groups.

    It has the pods' own port too, whatever `spec.endpoint.port` is: agents get their token through that one. So another
    `spec.endpoint.port` restarts no agent.
    """
    ports = [_service_port(_PORT_NAME, spec.endpoint.port)]
    if spec.endpoint.port != ENDPOINT_PORT:
        ports.append(_service_port(_PODS_PORT_NAME, ENDPOINT_PORT))
    made = child(service, "v1", "Service", service.name)
    # By this label a ServiceMonitor selects this Service, and not the groups' headless ones.
    made["metadata"]["labels"][labels.ROLE] = labels.SERVING
    return made | {"spec": {"type": "ClusterIP", "selector": labels.serving_selector(service), "ports": ports}}


def _service_port(name: str, port: int) -> dict[str, object]:
    return {"name": name, "port": port, "targetPort": ENDPOINT_PORT, "protocol": "TCP"}


def network_policy(service: Service, spec: InferenceServiceSpec, settings: Settings) -> Manifest:
    """Opens the endpoint to all, every port to the service's own pods, and the admin port to the operator.

    Pods that use a store read from each other's memory: agents of the same namespace reach the ports for it. Agents of other
    namespaces do not, since anybody there can give a pod any label.
    """
    pods = {labels.SERVICE: service.name}
    to_store = {"from": [{"podSelector": {"matchLabels": labels.AGENTS}}], "ports": [_STORE_PORTS]}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}},
        "podSelector": {"matchLabels": dict(settings.operator_labels)},
    }
    return child(service, "networking.k8s.io/v1", "NetworkPolicy", service.name) | {
        "spec": {
            "podSelector": {"matchLabels": pods},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": ENDPOINT_PORT, "protocol": "TCP"}]},
                {"from": [{"podSelector": {"matchLabels": pods}}]},
                {"from": [operator], "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
                *([to_store] if spec.kv_cache.store is not None else []),
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
    """Leads all paths to the Service, without a limit of a request's time: gateways end streams after 15 to 60 s by default."""
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        "backendRefs": [{"kind": "Service", "name": service.name, "port": spec.endpoint.port}],
        "timeouts": {"request": "0s"},
    }
    fields = route.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return child(service, "gateway.networking.k8s.io/v1", _ROUTE, service.name) | {"spec": {**fields, "rules": [rule]}}


def route_deletion(observed: Observed) -> tuple[Delete, ...]:
    """Deletes an HTTPRoute that the spec no longer has."""
    live, spec = observed.children.get((_ROUTE, observed.service.name)), observed.service.spec
    if live is None or spec is None or spec.endpoint.route is not None:
        return ()
    return (Delete(_ROUTE, observed.service.name, live["metadata"].get("uid", ""), why="spec.endpoint.route is gone"),)


def revision_children(service: Service, revision: Revision) -> tuple[Manifest, ...]:
    """Objects that are created once and never changed."""
    return revision_manifest(service, revision), config_manifest(service, revision)


def revision_manifest(service: Service, revision: Revision) -> Manifest:
    """The ControllerRevision, which the API server lets nobody change."""
    name = names.revision_object(service.name, revision.id)
    return child(service, "apps/v1", "ControllerRevision", name, revision=revision.id) | {
        "revision": revision.number,
        "data": revision.data,
    }


def config_manifest(service: Service, revision: Revision) -> Manifest:
    """The ConfigMap with agent.json."""
    name = names.revision_object(service.name, revision.id)
    return child(service, "v1", "ConfigMap", name, revision=revision.id) | {
        "immutable": True,
        "data": {"agent.json": revision.config},
    }


def group_children(service: Service, revision: Revision, group: str, nodes: int, token: str) -> tuple[Manifest, ...]:
    """A headless Service and a StatefulSet, both named as the group. The Service first: pods find their leader by it."""
    return headless_service(service, revision, group), stateful_set(service, revision, group, nodes, token)


def headless_service(service: Service, revision: Revision, group: str) -> Manifest:
    """Nodes find their leader by it before any of them is ready."""
    return child(service, "v1", "Service", group, revision=revision.id, group=group) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _group_selector(service, group),
            "ports": [{"name": "admin", "port": ADMIN_PORT, "targetPort": ADMIN_PORT, "protocol": "TCP"}],
        }
    }


def stateful_set(service: Service, revision: Revision, group: str, nodes: int, token: str) -> Manifest:
    """Never updated in place: its own rolling update would wait for one node of a gang while the others wait for that node."""
    template = with_token(service, revision.template, token)
    metadata = template["metadata"]
    return child(service, "apps/v1", "StatefulSet", group, revision=revision.id, group=group) | {
        "spec": {
            "replicas": nodes,
            "serviceName": group,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": _group_selector(service, group)},
            "template": template | {"metadata": metadata | {"labels": metadata["labels"] | {labels.GROUP: group}}},
        }
    }


def _group_selector(service: Service, group: str) -> dict[str, str]:
    return {labels.SERVICE: service.name, labels.GROUP: group}
