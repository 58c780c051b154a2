"""Labels and names: what is whose, and what Services and policies select by."""

from starling_operator.plan.observed import Service

API_VERSION = "serving.starling.dev/v1alpha1"
KIND = "InferenceService"
SERVICE = "serving.starling.dev/service"
GROUP = "serving.starling.dev/group"
REVISION = "serving.starling.dev/revision"
ROLE = "serving.starling.dev/role"
SERVING = "serving"
ORDINAL = "apps.kubernetes.io/pod-index"
"""Set on a StatefulSet's pods by Kubernetes itself: a template is the same for all nodes, so it cannot number them."""


AGENTS = {"app.kubernetes.io/name": "starling", "app.kubernetes.io/component": "agent"}
"""On the pods of all services."""


def common(service: Service) -> dict[str, str]:
    """On every child."""
    return {
        **AGENTS,
        "app.kubernetes.io/instance": service.name,
        "app.kubernetes.io/part-of": "starling",
        "app.kubernetes.io/managed-by": "starling-operator",
        SERVICE: service.name,
    }


def of_revision(service: Service, revision: str) -> dict[str, str]:
    return common(service) | {REVISION: revision}


def of_pods(service: Service, revision: str) -> dict[str, str]:
    """On the pods of every group of a revision; the group's own label is added where the group is made."""
    return of_revision(service, revision) | {ROLE: SERVING}


def serving_selector(service: Service) -> dict[str, str]:
    """All pods that clients may be sent to."""
    return {SERVICE: service.name, ROLE: SERVING}


def serving_selector_text(service: Service) -> str:
    return ",".join(f"{key}={value}" for key, value in serving_selector(service).items())


def leader_selector(service: Service) -> str:
    """One pod of each group: what an autoscaler takes averages over."""
    return f"{SERVICE}={service.name},{ORDINAL}=0"
