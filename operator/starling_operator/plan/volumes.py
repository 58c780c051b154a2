"""Volumes of an agent's pod: name, source and mount. The root file system is read-only."""

from dataclasses import dataclass
from typing import Any

from starling_crds.v1alpha1.model import SecretKey, WeightsCache
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.admin_token import TOKEN_VOLUME
from starling_operator.plan.config import ADMIN_PATH, CACHE_PATH, KEYS_PATH, KV_PATH, PIN_PATH, RESPONSES_PATH, TLS_PATH
from starling_operator.plan.source import MODELS_PATH, parse_source

HOME = "/home/starling"
CONFIG_FOLDER = "/etc/starling"
_SCRATCH = "4Gi"
"""Limit of /tmp and the home folder, for compiled kernels and the like: no pod fills its node's disk."""
UNSIZED_SHM: dict[str, Any] = {"medium": "Memory", "sizeLimit": None}
"""/dev/shm before its size is known. No user's volume equals it: an overlay has no null values."""
_OPTIONAL: dict[str, Any] = {"optional": True}
"""Lets a container start without its Secret. The agent waits for it and reports which one; a kubelet would not."""


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume and its only mount. Without a source the volume is no part of a revision: it is added where a group is created."""

    name: str
    source: dict[str, Any]
    path: str
    read_only: bool = False

    def volume(self) -> dict[str, Any]:
        return {"name": self.name} | self.source

    def mount(self) -> dict[str, Any]:
        return {"name": self.name, "mountPath": self.path} | ({"readOnly": True} if self.read_only else {})


def volumes(service: str, spec: InferenceServiceSpec, revision: str) -> list[Volume]:
    """Returns all volumes. Raises ValueError naming the field."""
    config = {"configMap": {"name": names.revision_object(service, revision)}}
    return [
        Volume("config", config, CONFIG_FOLDER, read_only=True),
        Volume(TOKEN_VOLUME, {}, ADMIN_PATH, read_only=True),
        Volume("tmp", {"emptyDir": {"sizeLimit": _SCRATCH}}, "/tmp"),
        Volume("home", {"emptyDir": {"sizeLimit": _SCRATCH}}, HOME),
        Volume("shm", {"emptyDir": UNSIZED_SHM}, "/dev/shm"),
        Volume("cache", _cache(spec.model.cache), CACHE_PATH),
        *_optional(service, spec, revision),
    ]


def _optional(service: str, spec: InferenceServiceSpec, revision: str) -> list[Volume]:
    """Volumes that only some services have."""
    found: list[Volume] = []
    model = parse_source(spec.model.source)
    claim = model.claim
    if model.is_mutable:
        # It does not exist before a first agent has asked the hub. A pod that starts later finds it, also without an operator.
        pin = {"configMap": {"name": names.pin(service, revision), "optional": True}}
        found.append(Volume("pin", pin, PIN_PATH, read_only=True))
    if claim is not None:
        source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        found.append(Volume("model", source, MODELS_PATH, read_only=True))
    keys = spec.endpoint.api_key_secret
    if keys is not None:
        found.append(api_keys(keys))
    if spec.endpoint.tls_secret is not None:
        found.append(Volume("tls", {"secret": {"secretName": spec.endpoint.tls_secret} | _OPTIONAL}, TLS_PATH, read_only=True))
    tier, store = spec.kv_cache.tiers.filesystem, spec.endpoint.response_store
    if tier is not None:
        found.append(Volume("kv", _folder(tier.claim, tier.path), KV_PATH))
    if store.claim is not None or store.path is not None:
        found.append(Volume("responses", _folder(store.claim, store.path), RESPONSES_PATH))
    return found


def api_keys(keys: SecretKey) -> Volume:
    secret = {"secret": {"secretName": keys.name, "items": [{"key": keys.key, "path": keys.key}]} | _OPTIONAL}
    return Volume("api-keys", secret, KEYS_PATH, read_only=True)


def _folder(claim: str | None, path: str | None) -> dict[str, Any]:
    """Source of a folder that outlives pods. Kubernetes gives a claim to the pods' fsGroup, but leaves a node's folder as it is."""
    if claim is not None:
        return {"persistentVolumeClaim": {"claimName": claim}}
    return {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def _cache(cache: WeightsCache) -> dict[str, Any]:
    if cache.claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {"sizeLimit": cache.size_limit} if cache.size_limit else {}}
