"""Kinds that the operator reads and writes, and their paths at the API server."""

from dataclasses import dataclass

GROUP, VERSION = "serving.starling.dev", "v1alpha1"
MANAGER = "starling-operator"
MANAGED = f"app.kubernetes.io/managed-by={MANAGER}"
SERVICE_LABEL = f"{GROUP}/service"
GROUP_LABEL = f"{GROUP}/group"
ROUTER_LABEL = f"{GROUP}/router"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of the API. `selector` limits its lists and watches."""

    name: str
    api_version: str
    plural: str
    selector: str = MANAGED

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Returns the path of one object, or of all objects in a namespace, or (None) in the cluster."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = [] if namespace is None else ["namespaces", namespace]
        return "/".join([root, *scope, self.plural, *filter(None, (name, subresource))])


INFERENCE_SERVICE = Kind("InferenceService", f"{GROUP}/{VERSION}", "inferenceservices", selector="")
PARALLELISM_SCALE = Kind("ParallelismScale", f"{GROUP}/{VERSION}", "parallelismscales")
POD = Kind("Pod", "v1", "pods")
"""Pods of agents and of routers, which other labels tell apart."""
LEASE = Kind("Lease", "coordination.k8s.io/v1", "leases", selector="")
NODE = Kind("Node", "v1", "nodes", selector="")
EVENT = Kind("Event", "events.k8s.io/v1", "events", selector="")
CHILDREN = (
    Kind("ControllerRevision", "apps/v1", "controllerrevisions"),
    Kind("StatefulSet", "apps/v1", "statefulsets"),
    Kind("Deployment", "apps/v1", "deployments"),
    Kind("Service", "v1", "services"),
    Kind("ConfigMap", "v1", "configmaps"),
    Kind("ServiceAccount", "v1", "serviceaccounts"),
    Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
    Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
    PARALLELISM_SCALE,
)
SECRET = Kind("Secret", "v1", "secrets")
"""Secrets of services are only created: their content is known without reading them. Of those with API keys versions are read."""
SERVICE_MONITOR = Kind("ServiceMonitor", "monitoring.coreos.com/v1", "servicemonitors")
HTTP_ROUTE = Kind("HTTPRoute", "gateway.networking.k8s.io/v1", "httproutes")
INFERENCE_POOL = Kind("InferencePool", "inference.networking.k8s.io/v1", "inferencepools")
OPTIONAL = (SERVICE_MONITOR, HTTP_ROUTE, INFERENCE_POOL)
BY_NAME = {kind.name: kind for kind in (INFERENCE_SERVICE, POD, SECRET, *CHILDREN, *OPTIONAL)}
WATCHED = (INFERENCE_SERVICE, POD, *CHILDREN)
"""Kinds that are watched; those of OPTIONAL are listed periodically instead."""
