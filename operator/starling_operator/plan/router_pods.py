"""Pod template of routers: restricted Pod Security, without a right at the API server, and ready also while no group serves."""

import json
from typing import Any

from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.listening import EVERYWHERE
from starling_crds.quantity import parse_quantity
from starling_crds.v1alpha1.router import RouterSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels, names
from starling_operator.plan.canary_notice import CANARY_FILE
from starling_operator.plan.config import KEYS_PATH, TOKEN_KEY, allowed_hosts
from starling_operator.plan.gateway import PickPort
from starling_operator.plan.observed import Manifest, Service, Settings
from starling_operator.plan.pod import pod, port, probe, spread
from starling_operator.plan.volumes import Volume, api_keys

CONTAINER = "router"
TOKEN_PATH = "/etc/starling-router"
CANARY_PATH = "/etc/starling-canary"
TENANTS_PATH, TENANTS_FILE = "/etc/starling-tenants", "tenants.yaml"
TENANTS = "serving.starling.dev/tenants"
"""Annotation that a pod mounts as its file of tenants: other tenants are other pods."""
_REQUESTS = {"cpu": "250m", "memory": "512Mi"}


def router_template(
    service: Service,
    spec: InferenceServiceSpec,
    router: RouterSpec,
    settings: Settings,
    token: dict[str, Any],
    *,
    pick: PickPort | None,
) -> Manifest:
    """`token`: source of the volume with the routers' token. `pick`: they pick for a Gateway."""
    keys = spec.endpoint.api_key_secret
    mounted = [
        Volume("token", token, TOKEN_PATH, read_only=True),
        *([api_keys(keys)] if keys is not None else []),
        *_tenants(router),
        Volume("canary", {"configMap": {"name": names.router(service.name), "optional": True}}, CANARY_PATH, read_only=True),
    ]
    spreading = {"topologySpreadConstraints": [spread("kubernetes.io/hostname", labels.router_selector(service))]}
    made = pod(service, spec, settings, _container(service, spec, router, settings, pick=pick), mounted)
    metadata: dict[str, Any] = {"labels": labels.of_routers(service)}
    if router.tenants:
        tenants = [tenant.model_dump(mode="json", by_alias=True, exclude_defaults=True) for tenant in router.tenants]
        metadata["annotations"] = {TENANTS: json.dumps(tenants)}
    return {"metadata": metadata, "spec": made | spreading | _placement(router)}


def _placement(router: RouterSpec) -> dict[str, Any]:
    """Fields of a pod's spec that have the same names in the router's."""
    fields = {"node_selector", "tolerations", "priority_class_name"}
    return router.model_dump(mode="json", by_alias=True, include=fields, exclude_none=True, exclude_defaults=True)


def _tenants(router: RouterSpec) -> list[Volume]:
    """The file of tenants, and beside it a folder with the keys of each. One whose data key is missing is let in no longer."""
    if not router.tenants:
        return []
    field = {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{TENANTS}']"}
    items = [{"key": tenant.name, "path": f"keys/{tenant.name}"} for tenant in router.tenants]
    sources = [
        {"downwardAPI": {"items": [{"path": TENANTS_FILE, "fieldRef": field}]}},
        {"secret": {"name": router.tenant_keys_secret, "items": items, "optional": True}},
    ]
    return [Volume("tenants", {"projected": {"sources": sources}}, TENANTS_PATH, read_only=True)]


def _container(
    service: Service,
    spec: InferenceServiceSpec,
    router: RouterSpec,
    settings: Settings,
    *,
    pick: PickPort | None,
) -> dict[str, Any]:
    limits, requests = router.resources.limits or {}, router.resources.requests or {}
    # With a limit alone, Kubernetes requests as much.
    usual = {name: value for name, value in _REQUESTS.items() if name not in limits}
    return {
        "name": CONTAINER,
        "image": settings.router_image or settings.agent_image,
        "imagePullPolicy": settings.router_image_pull_policy or settings.image_pull_policy,
        "command": ["starling", "router", *_arguments(service, spec, router, settings, pick=pick)],
        # Whatever folder the image names may be closed to this user.
        "workingDir": "/",
        "ports": [port("http", ENDPOINT_PORT), *(pick.container_ports() if pick is not None else [])],
        "resources": {"requests": usual | requests, **({"limits": limits} if limits else {})},
        # A router that has no backend is ready, and holds requests.
        "startupProbe": probe("http", "/health", period=1, timeout=5, failures=300),
        "livenessProbe": probe("http", "/health", period=10, timeout=5, failures=6),
        "readinessProbe": probe("http", "/health", period=1, timeout=5, failures=3),
    }


def _arguments(
    service: Service, spec: InferenceServiceSpec, router: RouterSpec, settings: Settings, *, pick: PickPort | None
) -> list[str]:
    policy, hold, limits, keys = router.policy, router.hold, spec.endpoint.limits, spec.endpoint.api_key_secret
    host = names.host(service.name, service.namespace, settings.cluster_domain)
    given = {
        "host": EVERYWHERE,
        "port": ENDPOINT_PORT,
        # With the dot at its end no search domain is tried.
        "backends-service": names.host(names.backends(service.name), service.namespace, settings.cluster_domain) + ".",
        "backends-port": ENDPOINT_PORT,
        "prefix-weight": policy.prefix,
        "load-weight": policy.load,
        "session-weight": policy.session,
        "hold-requests": hold.requests,
        "hold-bytes": parse_quantity(hold.bytes),
        "hold-seconds": hold.seconds,
        "max-body-bytes": parse_quantity(limits.max_body_bytes),
        "read-seconds": limits.read_seconds,
        "connection-seconds": limits.connection_seconds,
        "accept-seconds": spec.drain.accept_seconds,
        "drain-seconds": spec.drain.seconds,
        "router-token-file": f"{TOKEN_PATH}/{TOKEN_KEY}",
        "canary-file": f"{CANARY_PATH}/{CANARY_FILE}",
        **({"api-key-file": f"{KEYS_PATH}/{keys.key}"} if keys is not None else {}),
        **({"tenants-file": f"{TENANTS_PATH}/{TENANTS_FILE}", "routers": router.replicas} if router.tenants else {}),
    }
    return [
        *(pick.arguments() if pick is not None else []),
        *(f"--{name}={value:g}" if isinstance(value, float) else f"--{name}={value}" for name, value in given.items()),
        *(f"--allowed-origins={origin}" for origin in spec.endpoint.allowed_origins),
        *(f"--allowed-hosts={name}" for name in allowed_hosts(spec, host)),
    ]
