"""Strategic merge of `spec.template` into the agents' pod template, as `kubectl patch` does it.

Maps merge key by key, null removes a key. Lists of elements with a merge key merge by it. A toleration replaces those of the same
taint. Every other list is replaced.
"""

from collections.abc import Mapping
from typing import Any

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "topologySpreadConstraints": "topologyKey",
}
_REPLACED_AS_A_WHOLE = frozenset({"volumes", "env"})
"""Lists whose elements are one choice of several sources: a mixture of an old and a new one would be refused."""
_FIELD = "template"


def overlay(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new pod template. Raises ValueError with the path of what cannot be merged."""
    for name in patch:
        if name not in ("metadata", "spec"):
            raise ValueError(f"{_FIELD}.{name}: a pod template has metadata and spec only")
    return _merge_map(base, patch, _FIELD)


def _merge_map(base: Mapping[str, Any], patch: Mapping[str, Any], path: str) -> dict[str, Any]:
    merged = dict(base)
    for name, value in patch.items():
        if name.startswith("$"):
            raise ValueError(f"{path}.{name}: directives of strategic merge are not supported; null removes a key")
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value, name, f"{path}.{name}")
    return merged


def _merge(base: Any, patch: Any, name: str, path: str) -> Any:
    for kind, word in ((dict, "a map"), (list, "a list")):
        if isinstance(base, kind) and not isinstance(patch, kind):
            raise ValueError(f"{path}: must be {word}, got {patch!r}")
    if isinstance(patch, dict):
        return _merge_map(base if isinstance(base, dict) else {}, patch, path)
    if isinstance(patch, list) and name == "tolerations":
        return _tolerations(base or [], patch)
    if isinstance(patch, list) and name in _MERGE_KEYS:
        return _merge_list(base or [], patch, name, path)
    return patch


def _tolerations(base: list[Any], patch: list[Any]) -> list[Any]:
    """Replaces our tolerations of the user's taints. Of several that match a taint, Kubernetes takes the shortest."""
    return [*(ours for ours in base if not any(_covers(theirs, ours) for theirs in patch)), *patch]


def _covers(theirs: Any, ours: Mapping[str, Any]) -> bool:
    return isinstance(theirs, Mapping) and all(theirs.get(part) in (None, "", ours.get(part)) for part in ("key", "effect"))


def _merge_list(base: list[Any], patch: list[Any], name: str, path: str) -> list[Any]:
    key = _MERGE_KEYS[name]
    merged = {element[key]: element for element in base}
    for position, element in enumerate(patch):
        place = f"{path}[{position}]"
        if not isinstance(element, dict) or key not in element:
            raise ValueError(f"{place}: must be a map with {key}, which tells which one is meant")
        old = {} if name in _REPLACED_AS_A_WHOLE else merged.get(element[key], {})
        merged[element[key]] = _merge_map(old, element, place)
    return list(merged.values())
