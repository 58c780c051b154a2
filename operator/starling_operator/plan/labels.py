"""Metadata of children: the owner, and labels by which Services and policies select pods."""

from typing import Any

from starling_operator.plan.observed import Manifest, Service

API_VERSION = "serving.starling.dev/v1alpha1"
KIND = "InferenceService"
SERVICE = "serving.starling.dev/service"
GROUP = "serving.starling.dev/group"
REVISION = "serving.starling.dev/revision"
ROLE = "serving.starling.dev/role"
SERVING, ROUTING = "serving", "routing"
ROUTER = "serving.starling.dev/router"
ORDINAL = "apps.kubernetes.io/pod-index"
"""Set on a StatefulSet's pods by Kubernetes itself: a pod template is the same for all pods, so it cannot number them."""
AGENTS = {"app.kubernetes.io/name": "starling", "app.kubernetes.io/component": "agent"}
"""Labels that select the pods of all services."""


def common(service: Service) -> dict[str, str]:
    """Labels of every child."""
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
    """Labels of all pods of a revision. The label of the group is added where the group is created."""
    return of_revision(service, revision) | {ROLE: SERVING}


def serving_selector(service: Service) -> dict[str, str]:
    """Selects all pods that clients may be sent to."""
    return {SERVICE: service.name, ROLE: SERVING}


def router_selector(service: Service) -> dict[str, str]:
    """Selects the routers. They have no label of agents, so that nothing that is about groups sees them."""
    return {ROUTER: service.name}


def of_routers(service: Service) -> dict[str, str]:
    """Labels of the routers' pods."""
    ours = {name: value for name, value in common(service).items() if name != SERVICE}
    return ours | {"app.kubernetes.io/component": "router", ROUTER: service.name}


def serving_selector_text(service: Service) -> str:
    return ",".join(f"{key}={value}" for key, value in serving_selector(service).items())


def leader_selector(service: Service) -> str:
    """Selects the first pod of each group. The scale subresource gives it to autoscalers, which average over these pods."""
    return f"{SERVICE}={service.name},{ORDINAL}=0"


def child(
    service: Service, api_version: str, kind: str, name: str, *, revision: str | None = None, group: str | None = None
) -> Manifest:
    """Returns apiVersion, kind and metadata. blockOwnerDeletion is false: no deletion waits for an operator that is gone."""
    all_labels = common(service)
    if revision is not None:
        all_labels[REVISION] = revision
    if group is not None:
        all_labels[GROUP] = group
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": service.namespace,
        "labels": all_labels,
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.name,
                "uid": service.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
