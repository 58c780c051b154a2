"""Manifests of the children: those of a service, of a revision and of a group."""

from starling_agent.contract.config import ADMIN_PORT, ENDPOINT_PORT
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels, names
from starling_operator.plan.admin_token import with_token
from starling_operator.plan.endpoint_policy import network_policy
from starling_operator.plan.gateway import gateway_children
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed, Service
from starling_operator.plan.revision import Revision
from starling_operator.plan.router import leads_to_routers, router_children

_PORT_NAME = "http"
_PODS_PORT_NAME = "pods"


def service_children(observed: Observed, spec: InferenceServiceSpec) -> tuple[Manifest, ...]:
    """Children that a service has once, in the order in which they are applied."""
    service, to_routers = observed.service, leads_to_routers(observed)
    always = (
        service_account(service),
        *router_children(observed, spec),
        endpoint_service(service, spec, to_routers=to_routers),
        network_policy(observed, spec, to_routers=to_routers),
    )
    monitor = (service_monitor(service, spec),) if observed.settings.service_monitors else ()
    return (*always, *monitor, *gateway_children(observed, spec))


def service_account(service: Service) -> Manifest:
    """The pods' identity: without a token, and bound to no role."""
    return child(service, "v1", "ServiceAccount", names.service_account(service.name)) | {"automountServiceAccountToken": False}


def endpoint_service(service: Service, spec: InferenceServiceSpec, *, to_routers: bool) -> Manifest:
    """The Service for clients: ready pods of all groups, or their routers.

    It has the pods' own port too, whatever `spec.endpoint.port` is: agents get their token through that one. So another
    `spec.endpoint.port` restarts no agent.
    """
    ports = [_service_port(_PORT_NAME, spec.endpoint.port)]
    if spec.endpoint.port != ENDPOINT_PORT:
        ports.append(_service_port(_PODS_PORT_NAME, ENDPOINT_PORT))
    made = child(service, "v1", "Service", service.name)
    # By this label a ServiceMonitor selects this Service, and not the groups' headless ones.
    made["metadata"]["labels"][labels.ROLE] = labels.ROUTING if to_routers else labels.SERVING
    selector = labels.router_selector(service) if to_routers else labels.serving_selector(service)
    return made | {"spec": {"type": "ClusterIP", "selector": selector, "ports": ports}}


def _service_port(name: str, port: int) -> dict[str, object]:
    return {"name": name, "port": port, "targetPort": ENDPOINT_PORT, "protocol": "TCP"}


def service_monitor(service: Service, spec: InferenceServiceSpec) -> Manifest:
    """Prometheus scrapes each pod through its Services: agents, and routers if there are any. /metrics is open without a key."""
    endpoint: dict[str, object] = {"port": _PORT_NAME, "path": "/metrics", "interval": "15s"}
    if spec.endpoint.tls_secret is not None:
        # Pods are scraped by address, which no certificate names.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return child(service, "monitoring.coreos.com/v1", "ServiceMonitor", service.name) | {
        "spec": {"selector": _scraped(service, spec), "endpoints": [endpoint]}
    }


def _scraped(service: Service, spec: InferenceServiceSpec) -> Manifest:
    """Selects the Services whose pods are scraped."""
    if spec.router is None:
        return {"matchLabels": labels.serving_selector(service)}
    roles = {"key": labels.ROLE, "operator": "In", "values": [labels.SERVING, labels.ROUTING]}
    return {"matchLabels": {labels.SERVICE: service.name}, "matchExpressions": [roles]}


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
