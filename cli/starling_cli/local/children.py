"""The children of the service, as files. For `starling up` they are what the API server is for the operator."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path

from starling_operator.plan.observed import Manifest


class LocalChildren:
    """Objects by (kind, name). Each is also a file in `folder`, for people to look at; nobody else writes there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._version = 0

    @property
    def objects(self) -> Mapping[tuple[str, str], Manifest]:
        return self._objects

    def create(self, manifest: Manifest) -> None:
        """Does nothing where the object exists."""
        if _key(manifest) not in self._objects:
            self._write(manifest, {})

    def apply(self, manifest: Manifest) -> None:
        """Creates or replaces the object. The version grows only with a change."""
        before = self._objects.get(_key(manifest), {})
        if _without_own_metadata(before) != _without_own_metadata(manifest):
            self._write(manifest, before)

    def delete(self, kind: str, name: str, uid: str) -> None:
        """Deletes the object if it still has this UID."""
        found = self._objects.get((kind, name))
        if found is not None and found["metadata"]["uid"] == uid:
            del self._objects[kind, name]
            self._file(kind, name).unlink()

    def of_kind(self, kind: str) -> dict[str, Manifest]:
        return {name: manifest for (found, name), manifest in self._objects.items() if found == kind}

    def _write(self, manifest: Manifest, before: Manifest) -> None:
        self._version += 1
        uid = before.get("metadata", {}).get("uid") or str(uuid.uuid4())
        metadata = {**manifest["metadata"], "uid": uid, "resourceVersion": str(self._version)}
        stored = {**manifest, "metadata": metadata}
        self._objects[_key(manifest)] = stored
        file = self._file(*_key(manifest))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(json.dumps(stored, indent=2))

    def _file(self, kind: str, name: str) -> Path:
        return self._folder / kind / f"{name}.json"


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _without_own_metadata(manifest: Manifest) -> Manifest:
    """Returns the object as it was written, without the metadata that the store adds."""
    own = ("uid", "resourceVersion")
    metadata = {key: value for key, value in manifest.get("metadata", {}).items() if key not in own}
    return {**manifest, "metadata": metadata}
