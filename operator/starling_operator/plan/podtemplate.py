"""Pod template of a revision: restricted Pod Security by default, then the user's overlay on top."""

from collections.abc import Mapping
from typing import Any

from starling_agent.contract import identity
from starling_agent.contract.config import ADMIN_PORT, CONFIG_PATH, ENDPOINT_PORT
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import labels
from starling_operator.plan.observed import Manifest, Service, Settings
from starling_operator.plan.overlay import overlay
from starling_operator.plan.pod import pod, port, probe, spread
from starling_operator.plan.resources import check_quantities, check_tiers, memory_limit, requests, shm_bytes
from starling_operator.plan.volumes import HOME, UNSIZED_SHM, volumes

CONTAINER = "agent"
_TOLERATION_SECONDS = 30
_SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"


def pod_template(service: Service, spec: InferenceServiceSpec, settings: Settings, revision: str) -> Manifest:
    """Returns the template without the group's label, which is added for each group. Raises ValueError naming the field."""
    merged = overlay(_base(service, spec, settings, revision), spec.template)
    limit = _memory_limit(merged)
    check_tiers(spec, limit)
    _set_shm_size(merged, shm_bytes(spec.accelerators.per_node, limit))
    check_quantities(merged)
    _add_requests(merged, requests(spec))
    metadata = merged.setdefault("metadata", {})
    # Last, so that an overlay cannot take a pod out of its Service.
    metadata["labels"] = metadata.get("labels", {}) | labels.of_pods(service, revision)
    return merged


def agent_image(spec: InferenceServiceSpec, settings: Settings) -> str:
    return spec.image or settings.agent_image


def _base(service: Service, spec: InferenceServiceSpec, settings: Settings, revision: str) -> dict[str, Any]:
    mounted = volumes(service.name, spec, revision)
    own = {
        "tolerations": [_toleration("not-ready"), _toleration("unreachable"), *_device_tolerations(spec)],
        "topologySpreadConstraints": _topology_spread(service, revision),
    }
    # Else the cluster autoscaler keeps a node for volumes that any pod can make again.
    scratch = ",".join(volume.name for volume in mounted if "emptyDir" in volume.source)
    annotations = {"kubectl.kubernetes.io/default-container": CONTAINER, _SAFE_TO_EVICT: scratch}
    made = pod(service, spec, settings, _container(spec, settings), mounted)
    return {"metadata": {"labels": {}, "annotations": annotations}, "spec": made | own}


def _set_shm_size(template: dict[str, Any], size: int) -> None:
    """Sizes /dev/shm, unless the user has another volume for it. It has to fit the memory limit, which the user's part sets."""
    for volume in template["spec"].get("volumes") or ():
        if volume.get("emptyDir") == UNSIZED_SHM:
            volume["emptyDir"] = UNSIZED_SHM | {"sizeLimit": str(size)}


def _add_requests(template: dict[str, Any], wanted: Mapping[str, str]) -> None:
    """Adds requests of resources that the user does not name. With a limit alone, Kubernetes requests as much."""
    resources = next(one for one in template["spec"]["containers"] if one["name"] == CONTAINER).setdefault("resources", {})
    named = {*(resources.get("limits") or {}), *(resources.get("requests") or {})}
    missing = {name: value for name, value in wanted.items() if name not in named}
    if missing:
        resources["requests"] = {**(resources.get("requests") or {}), **missing}


def _topology_spread(service: Service, revision: str) -> list[dict[str, Any]]:
    """Spreads groups over nodes and zones where there is room. Each group counts by its leader's pod."""
    leaders = {labels.SERVICE: service.name, labels.REVISION: revision, labels.ORDINAL: "0"}
    return [spread(key, leaders) for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")]


def _memory_limit(template: dict[str, Any]) -> int | None:
    containers = template.get("spec", {}).get("containers", [])
    agent = next((container for container in containers if container["name"] == CONTAINER), None)
    if agent is None:
        raise ValueError(f"template.spec.containers: the container named {CONTAINER} has to stay")
    limits = agent.get("resources", {}).get("limits", {})
    field = "template.spec.containers[agent].resources.limits"
    if not isinstance(limits, dict):
        raise ValueError(f"{field}: must be a map, got {limits!r}")
    try:
        return memory_limit(limits)
    except ValueError as error:
        raise ValueError(f"{field}.memory: {error}") from None


def _container(spec: InferenceServiceSpec, settings: Settings) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": agent_image(spec, settings),
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["starling", "agent", "--config", CONFIG_PATH],
        "env": _environment(spec),
        "ports": [port("http", ENDPOINT_PORT), port("admin", ADMIN_PORT)],
        "resources": _resources(spec),
        # /live asks the supervisor alone: a kubelet never kills a pod that loads, or whose collective hangs.
        "startupProbe": probe("admin", "/live", period=1, timeout=3, failures=300),
        "livenessProbe": probe("admin", "/live", period=10, timeout=5, failures=6),
        "readinessProbe": probe("admin", "/ready", period=1, timeout=3, failures=3),
    }


def _environment(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    variables = [
        _field(identity.POD_NAME, "metadata.name"),
        _field(identity.POD_IP, "status.podIP"),
        _field(identity.POD_NAMESPACE, "metadata.namespace"),
        _field(identity.GROUP, f"metadata.labels['{labels.GROUP}']"),
        _field(identity.HOST, "spec.nodeName"),
        {"name": "HOME", "value": HOME},
    ]
    token = spec.model.token_secret
    if token is not None:
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    return variables


def _field(name: str, path: str) -> dict[str, Any]:
    # The API server would add the version, and each comparison would find a difference.
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _resources(spec: InferenceServiceSpec) -> dict[str, Any]:
    """Devices. Other requests are added after the user's part is merged."""
    if spec.accelerators.type == "cpu":
        return {}
    return {"limits": {spec.accelerators.type: str(spec.accelerators.per_node)}}


def _device_tolerations(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Tolerates the taint by which most clouds keep pods without devices off nodes with some. It is named as the resource."""
    device = spec.accelerators.type
    return [] if device == "cpu" else [{"key": device, "operator": "Exists", "effect": "NoSchedule"}]


def _toleration(condition: str) -> dict[str, Any]:
    return {
        "key": f"node.kubernetes.io/{condition}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": _TOLERATION_SECONDS,
    }
