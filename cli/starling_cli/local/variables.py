"""The environment of a pod's container, with this machine's values for what a cluster would fill in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starling_cli.local.ports import LOCALHOST
from starling_cli.local.volumes import LaunchError, Mount, Objects, path_here


@dataclass(frozen=True)
class DownwardFields:
    """Values of the downward API."""

    name: str
    namespace: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    host: str

    def field(self, path: str) -> str:
        for prefix, values in (("metadata.labels", self.labels), ("metadata.annotations", self.annotations)):
            if path.startswith(f"{prefix}["):
                return values.get(path.removeprefix(prefix).strip("[]'\""), "")
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "status.podIP": LOCALHOST,
            "status.podIPs": LOCALHOST,
            "status.hostIP": LOCALHOST,
            "spec.nodeName": self.host,
            "spec.serviceAccountName": "",
        }
        if path not in known:
            raise LaunchError(f"env: fieldPath {path!r} is not known here; possible: {', '.join(known)}")
        return known[path]


def environment(container: dict[str, Any], fields: DownwardFields, objects: Objects, mounts: tuple[Mount, ...]) -> dict[str, str]:
    """Returns the variables. Raises LaunchError naming the one that is not possible here."""
    values: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        values |= _all_of(source, objects)
    for entry in container.get("env") or ():
        value = _value(entry, fields, objects)
        if value is not None:
            values[entry["name"]] = path_here(value, mounts)
    return values


def _value(entry: dict[str, Any], fields: DownwardFields, objects: Objects) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return str(entry.get("value") or "")
    field = f"env[{entry['name']}]"
    if "fieldRef" in source:
        return fields.field(source["fieldRef"]["fieldPath"])
    if "secretKeyRef" in source:
        return _key(objects.secret(source["secretKeyRef"]["name"], field), source["secretKeyRef"], field)
    if "configMapKeyRef" in source:
        return _key(objects.config_map(source["configMapKeyRef"]["name"], field), source["configMapKeyRef"], field)
    if "resourceFieldRef" in source:
        # Limits of a pod do not bind a process here; the agent reads what binds it from the cgroup.
        return None
    raise LaunchError(f"{field}: valueFrom {', '.join(source)} is not possible here")


def _key(content: dict[str, bytes], reference: dict[str, Any], field: str) -> str | None:
    if reference["key"] in content:
        return content[reference["key"]].decode().strip()
    if reference.get("optional"):
        return None
    raise LaunchError(f"{field}: {reference['name']!r} has no key {reference['key']!r}; it has {', '.join(content) or 'none'}")


def _all_of(source: dict[str, Any], objects: Objects) -> dict[str, str]:
    if "secretRef" in source:
        content = objects.secret(source["secretRef"]["name"], "envFrom")
    else:
        content = objects.config_map(source["configMapRef"]["name"], "envFrom")
    return {f"{source.get('prefix', '')}{key}": value.decode() for key, value in content.items()}
