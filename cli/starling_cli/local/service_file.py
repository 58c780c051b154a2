"""A manifest's file as a service: parsed as by the API server, and checked for what this machine can do."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from starling_operator.plan.observed import Service

from starling_cli.local.documents import Document, DocumentError, objects_of_kind, one_service, read_documents
from starling_cli.local.sources import PathMap, SourceError, claim_folder, local_model
from starling_cli.local.volumes import Object

DEFAULT_NAMESPACE = "default"
Stamp = tuple[int, int, int]
"""Inode, time of change and size of a file."""


@dataclass(frozen=True)
class LoadedService:
    """`service.spec` is None where the file cannot be used, and `service.spec_error` says why."""

    service: Service
    secrets: Mapping[str, Object] = field(default_factory=dict)
    config_maps: Mapping[str, Object] = field(default_factory=dict)


def load_service(file: Path, name: str | None, maps: Sequence[PathMap]) -> LoadedService:
    """Never raises: the error of a file that is half written is in the service; it is loaded again when it changes."""
    try:
        documents = read_documents(file)
        service = service_of(one_service(documents, str(file), name))
    except DocumentError as error:
        return LoadedService(_unusable(name or "", str(error)))
    return LoadedService(_checked(service, maps), objects_of_kind(documents, "Secret"), objects_of_kind(documents, "ConfigMap"))


def service_of(document: Document, namespace: str | None = None) -> Service:
    """Returns the service as the operator would see it right after `kubectl apply`, which has `namespace` from its flags."""
    from starling_crds.parse import parse

    parsed = parse(document.body)
    return Service(
        name=document.name,
        namespace=document.namespace or namespace or DEFAULT_NAMESPACE,
        uid=f"local-{document.name}",
        generation=1,
        resource_version="1",
        spec=parsed.spec,
        spec_error=parsed.error,
    )


def _checked(service: Service, maps: Sequence[PathMap]) -> Service:
    if service.spec is None:
        return service
    folder = service.spec.kv_cache.tiers.filesystem
    field = "spec.model.source"
    try:
        local_model(service.spec.model.source, maps)
        field = "spec.kvCache.tiers.filesystem.claim"
        if folder is not None and folder.claim is not None:
            claim_folder(folder.claim, maps)
    except SourceError as error:
        return replace(service, spec=None, spec_error=f"{field}: {error}")
    return service


def _unusable(name: str, error: str) -> Service:
    return Service(
        name=name, namespace=DEFAULT_NAMESPACE, uid="local", generation=1, resource_version="1", spec=None, spec_error=error
    )


@dataclass
class WatchedFile:
    """A file whose changes are noticed, also those of editors that replace it."""

    path: Path
    _seen: Stamp | None = None
    _looked: bool = False

    def has_changed(self) -> bool:
        """Returns True once for each change; the first call counts as one."""
        stamp = _stamp(self.path)
        is_new = not self._looked or stamp != self._seen
        self._seen, self._looked = stamp, True
        return is_new


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
