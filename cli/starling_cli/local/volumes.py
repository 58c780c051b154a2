"""Volumes of a pod as folders of this machine."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starling_cli.local.sources import PathMap, SourceError, claim_folder, node_folder

Object = dict[str, Any]


class LaunchError(Exception):
    """A pod cannot start here; the message names the field and what is possible."""


@dataclass(frozen=True)
class Objects:
    """Secrets and ConfigMaps by name, of the manifest's file and of the plan."""

    secrets: Mapping[str, Object]
    config_maps: Mapping[str, Object]
    manifest: str
    """Name of the manifest's file, for messages."""

    def secret(self, name: str, field: str) -> dict[str, bytes]:
        found = self.secrets.get(name)
        if found is None:
            raise LaunchError(f"{field}: Secret {name!r} is not in {self.manifest}; add it there (kind: Secret, stringData)")
        decoded = {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
        return decoded | {key: str(value).encode() for key, value in (found.get("stringData") or {}).items()}

    def config_map(self, name: str, field: str) -> dict[str, bytes]:
        found = self.config_maps.get(name)
        if found is None:
            raise LaunchError(f"{field}: ConfigMap {name!r} is not in {self.manifest}; add it there")
        return {key: str(value).encode() for key, value in (found.get("data") or {}).items()}


@dataclass(frozen=True)
class Mount:
    """`path` in the pod is `folder` here."""

    path: str
    folder: Path


def mount_all(
    template: Object,
    container: Object,
    objects: Objects,
    maps: Sequence[PathMap],
    folder: Path,
    persistent: Mapping[str, Path],
) -> tuple[Mount, ...]:
    """Fills folders below `folder` with the volumes' content. `persistent` gives folders for paths whose content outlives the pod.

    Raises LaunchError.
    """
    volumes = {volume["name"]: volume for volume in template["spec"].get("volumes") or ()}
    made: dict[str, Path] = {}
    mounts = []
    for entry in container.get("volumeMounts") or ():
        name = entry["name"]
        if name not in volumes:
            raise LaunchError(f"volumeMounts: there is no volume {name!r}")
        path = entry["mountPath"].rstrip("/")
        if path in persistent and "hostPath" not in volumes[name]:
            mounts.append(Mount(path, persistent[path]))
            continue
        if name not in made:
            made[name] = _materialize(volumes[name], template, objects, maps, folder / name)
        target = made[name] / entry["subPath"] if entry.get("subPath") else made[name]
        mounts.append(Mount(path, target))
    return tuple(mounts)


def _materialize(volume: Object, template: Object, objects: Objects, maps: Sequence[PathMap], folder: Path) -> Path:
    field = f"volumes[{volume['name']}]"
    if "emptyDir" in volume:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder
    if "configMap" in volume:
        source = volume["configMap"]
        if source.get("optional") and source["name"] not in objects.config_maps:
            return _write(folder, {})
        return _write(folder, _selected_keys(objects.config_map(source["name"], field), source))
    if "secret" in volume:
        source = volume["secret"]
        return _write(folder, _selected_keys(objects.secret(source["secretName"], field), source))
    if "projected" in volume:
        contents = [_projected(source, template, objects, field) for source in volume["projected"]["sources"]]
        return _write(folder, {path: data for content in contents for path, data in content.items()})
    if "hostPath" in volume:
        return _node_folder(volume["hostPath"], maps)
    if "persistentVolumeClaim" in volume:
        try:
            return claim_folder(volume["persistentVolumeClaim"]["claimName"], maps)
        except SourceError as error:
            raise LaunchError(f"{field}: {error}") from None
    kind = ", ".join(sorted(set(volume) - {"name"})) or "nothing"
    raise LaunchError(f"{field}: {kind} is not possible here; emptyDir, configMap, secret, projected and hostPath are")


def _projected(source: Object, template: Object, objects: Objects, field: str) -> dict[str, bytes]:
    """Returns the files of one of a projected volume's sources: a Secret's, or annotations of the pod."""
    if "secret" in source:
        secret = source["secret"]
        content = {} if secret.get("optional") and secret["name"] not in objects.secrets else objects.secret(secret["name"], field)
        return _selected_keys(content, secret)
    annotations = {f"metadata.annotations['{key}']": value for key, value in template["metadata"].get("annotations", {}).items()}
    items = source.get("downwardAPI", {}).get("items") or ()
    if not items or any(item.get("fieldRef", {}).get("fieldPath") not in annotations for item in items):
        raise LaunchError(f"{field}: of projected sources secret, and downwardAPI of the pod's annotations, are possible here")
    return {item["path"]: annotations[item["fieldRef"]["fieldPath"]].encode() for item in items}


def add_late_config_maps(template: Object, objects: Objects, folder: Path) -> None:
    """Writes optional ConfigMaps that came after the pod, as a kubelet does; `folder` is the pod's."""
    for volume in template["spec"].get("volumes") or ():
        source = volume.get("configMap") or {}
        mounted = folder / volume["name"]
        if source.get("optional") and source["name"] in objects.config_maps and mounted.is_dir() and not any(mounted.iterdir()):
            _materialize(volume, template, objects, (), mounted)


def _node_folder(source: Object, maps: Sequence[PathMap]) -> Path:
    found = node_folder(source["path"], maps)
    if source.get("type") == "DirectoryOrCreate":
        found.mkdir(parents=True, exist_ok=True)
    return found


def _selected_keys(content: dict[str, bytes], source: Object) -> dict[str, bytes]:
    """Returns all keys, or those that `items` names, under the paths that it gives."""
    items = source.get("items")
    if items is None:
        return content
    return {item["path"]: content[item["key"]] for item in items if item["key"] in content}


def _write(folder: Path, content: dict[str, bytes]) -> Path:
    """Writes a volume's files. What a pod before had there and is no longer told goes: it may be a key that was taken back."""
    for stale in [file for file in folder.rglob("*") if file.is_file() and str(file.relative_to(folder)) not in content]:
        stale.unlink()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, data in content.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        file.write_bytes(data)
    return folder


def local_path(path: str, mounts: Sequence[Mount]) -> Path | None:
    """Returns the local path of a path in the pod; None where no volume is mounted there."""
    inside = [mount for mount in mounts if path == mount.path or path.startswith(f"{mount.path}/")]
    if not inside:
        return None
    mount = max(inside, key=lambda entry: len(entry.path))
    return mount.folder / path.removeprefix(mount.path).lstrip("/")


def path_here(value: str, mounts: Sequence[Mount]) -> str:
    """Returns the local path of a value that is a path in a volume, as those of caches are; another value as it is."""
    found = local_path(value, mounts) if value.startswith("/") else None
    return str(found) if found is not None else value
