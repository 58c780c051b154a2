"""Routers of a service with `spec.router`: what the Service for clients leads to, and the children that routers need.

Routers are no part of a revision: they come, change and go without new groups. A Service that exists is led to them once one is
ready, and back before they go. So no client is refused.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.router import router_token
from starling_crds.v1alpha1.router import RouterSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels, names
from starling_operator.plan.admin_token import mounted_token, secret_with
from starling_operator.plan.config import has_tenants
from starling_operator.plan.decision import Delete, deletion
from starling_operator.plan.endpoint_policy import seconds_to_open
from starling_operator.plan.gateway import is_port_guarded, pick_ingress, pick_port, picks, seconds_of_pool
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Observed, Service
from starling_operator.plan.router_pods import router_template
from starling_operator.plan.scaling import serves_since

HANDOVER_SECONDS = 5.0
"""Routers that held requests until a group served have so long to send them on, before they may go."""
_ROUTER = ("Deployment", "PodDisruptionBudget", "NetworkPolicy")
"""Kinds of children that are named as the routers' Deployment."""
_PROBLEMS = (("ReplicaFailure", "True"), ("Progressing", "False"))
"""Conditions of a Deployment, with the status that says that its pods do not come."""
_SPEC = "serving.starling.dev/spec"
"""Annotation of the Deployment: digest of the spec that was applied. Its generation alone does not say which one it is of."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """Routers as observed.

    updated   those of the present spec; counted by `router_rollout` alone
    old       others, which are to go
    problem   why a rollout does not go on: somebody paused it, or Kubernetes' message why pods are not created or do not come; ""
    """

    replicas: int
    ready: int
    problem: str = ""
    updated: int = 0
    old: int = 0


def router_state(observed: Observed) -> RouterState | None:
    """Returns None if the spec asks for no routers."""
    spec = _router(observed)
    if spec is None:
        return None
    live = _deployment(observed) or {}
    conditions = {one["type"]: one for one in (live.get("status") or {}).get("conditions") or ()}
    found = (one for kind, bad in _PROBLEMS if (one := conditions.get(kind)) is not None and one["status"] == bad)
    problem = next((str(one["message"]) for one in found), "")
    if live.get("spec", {}).get("paused"):
        name = names.router(observed.service.name)
        problem = f"the Deployment {name} is paused: kubectl rollout resume deployment {name}"
    return RouterState(spec.replicas, _ready(live), problem)


def router_rollout(observed: Observed, spec: InferenceServiceSpec) -> RouterState | None:
    """Returns the same with how many routers run the present spec, as `kubectl rollout status` counts them."""
    state, live = router_state(observed), _deployment(observed)
    if state is None or live is None or spec.router is None:
        return state
    status, metadata = live.get("status") or {}, live["metadata"]
    count, updated = int(status.get("replicas", 0)), int(status.get("updatedReplicas", 0))
    wanted = _deployment_of(observed, spec, spec.router)["metadata"]["annotations"]
    is_applied = wanted.items() <= (metadata.get("annotations") or {}).items()
    if not is_applied or status.get("observedGeneration") != metadata.get("generation"):
        updated = 0
    return replace(state, updated=updated, old=max(0, count - updated))


def leads_to_routers(observed: Observed) -> bool:
    """Says whether the Service for clients selects routers. It stays with them while none is ready: one of them will be."""
    state = router_state(observed)
    if state is None:
        return seconds_to_stay(observed) > 0
    return ("Service", observed.service.name) not in observed.children or state.ready > 0 or _is_led_to_routers(observed)


def seconds_to_stay(observed: Observed) -> float:
    """Returns for how long routers stay that the spec no longer has: infinitely while no group serves, but some are to.

    Requests wait in them until then, and would be refused. Routers that are not ready hold none, and keep agents from their proof.
    They also stay until agents are open to all, whom clients are led to then.
    """
    service, live = observed.service, _deployment(observed)
    spec = service.spec
    if live is None or spec is None or spec.router is not None or spec.suspend or not spec.replicas:
        return 0.0
    if not _ready(live) or not _is_led_to_routers(observed):
        return 0.0
    since = serves_since(service.status)
    if since is None:
        return math.inf
    return max(seconds_of_pool(observed), seconds_to_open(observed), since + HANDOVER_SECONDS - observed.now)


def answers_routers_alone(observed: Observed) -> bool | None:
    """Says whether agents are to answer routers alone; None: the spec cannot be read, and they stay as they are.

    With tenants they have no keys, so it holds also while clients are still led to them. A gateway that fails open sends them
    requests without the routers' token: they check keys themselves then.
    """
    spec = observed.service.spec
    return None if spec is None else has_tenants(spec) or (leads_to_routers(observed) and not spec.fails_open)


def router_secret(observed: Observed) -> tuple[Manifest, ...]:
    """Makes the Secret with the routers' token while a router still has to mount it."""
    state = router_state(observed)
    if state is None or state.ready >= state.replicas:
        return ()
    return (secret_with(observed.service, *_secret(observed)),)


def router_children(observed: Observed, spec: InferenceServiceSpec) -> tuple[Manifest, ...]:
    """Children that only a service with routers has, in the order in which they are applied."""
    if spec.router is None:
        return ()
    service = observed.service
    always = (backends_service(service), _network_policy(observed, spec), _budget(service))
    if spec.has_pool and not is_port_guarded(observed, spec):
        return always
    return (*always, _deployment_of(observed, spec, spec.router))


def router_deletions(observed: Observed) -> Iterator[Delete]:
    """Deletes the routers once the spec no longer has them: they drain, and the Service for clients leads elsewhere."""
    if observed.service.spec is None or _router(observed) is not None or seconds_to_stay(observed) > 0:
        return
    service = observed.service.name
    for kind, name in [*((kind, names.router(service)) for kind in _ROUTER), ("Service", names.backends(service))]:
        yield from deletion(observed, kind, name, "spec.router is gone")


def backends_service(service: Service) -> Manifest:
    """Names all agents that serve, ready or not: routers ask each for its state, and Prometheus for its metrics."""
    made = child(service, "v1", "Service", names.backends(service.name))
    made["metadata"]["labels"][labels.ROLE] = labels.SERVING
    port = {"name": "http", "port": ENDPOINT_PORT, "targetPort": ENDPOINT_PORT, "protocol": "TCP"}
    selector = labels.serving_selector(service)
    return made | {"spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}}


def _network_policy(observed: Observed, spec: InferenceServiceSpec) -> Manifest:
    """Opens the routers' endpoint to all, and the port where they pick to gateways."""
    service = observed.service
    return child(service, "networking.k8s.io/v1", "NetworkPolicy", names.router(service.name)) | {
        "spec": {
            "podSelector": {"matchLabels": labels.router_selector(service)},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"port": ENDPOINT_PORT, "protocol": "TCP"}]}, *pick_ingress(observed, spec)],
        }
    }


def _budget(service: Service) -> Manifest:
    return child(service, "policy/v1", "PodDisruptionBudget", names.router(service.name)) | {
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": labels.router_selector(service)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
    }


def _deployment_of(observed: Observed, spec: InferenceServiceSpec, router: RouterSpec) -> Manifest:
    """A router that is to go does so when another one is ready."""
    service = observed.service
    token = mounted_token(_secret(observed)[0])
    made = child(service, "apps/v1", "Deployment", names.router(service.name)) | {
        "spec": {
            "replicas": router.replicas,
            "revisionHistoryLimit": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": labels.router_selector(service)},
            "template": router_template(
                service, spec, router, observed.settings, token, pick=pick_port(observed, spec) if picks(observed, spec) else None
            ),
        }
    }
    made["metadata"]["annotations"] = {_SPEC: hashlib.sha256(json.dumps(made["spec"]).encode()).hexdigest()}
    return made


def _secret(observed: Observed) -> tuple[str, str]:
    """Returns name and token."""
    token = router_token(observed.token.encode()).decode()
    return names.with_digest(names.router(observed.service.name), token), token


def _router(observed: Observed) -> RouterSpec | None:
    return observed.service.spec.router if observed.service.spec is not None else None


def _deployment(observed: Observed) -> Manifest | None:
    return observed.children.get(("Deployment", names.router(observed.service.name)))


def _ready(deployment: Manifest) -> int:
    """Returns how many routers of a live Deployment are ready."""
    return int((deployment.get("status") or {}).get("readyReplicas", 0))


def _is_led_to_routers(observed: Observed) -> bool:
    """Says whether the live Service for clients selects routers."""
    live = observed.children.get(("Service", observed.service.name))
    return live is not None and live["spec"].get("selector") == labels.router_selector(observed.service)
