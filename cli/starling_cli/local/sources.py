"""Weights on this machine: the meaning of `file://` and `pvc://` in a manifest without a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

IMAGE_MODELS = "/opt/starling/models"
"""Folder of the agent's image with a small model, so that an example needs no download on a cluster either."""
FILE, CLAIM = "file://", "pvc://"


class SourceError(Exception):
    """Something is not on this machine; the message says what is possible."""


@dataclass(frozen=True)
class PathMap:
    """`prefix` is an absolute path, or pvc://CLAIM; `folder` stands in its place here."""

    prefix: str
    folder: Path


def parse_map(text: str) -> PathMap:
    """Parses FROM=TO. Raises ValueError with what is possible."""
    prefix, separator, folder = text.partition("=")
    is_claim = prefix.startswith(CLAIM) and len(prefix) > len(CLAIM) and "/" not in prefix.removeprefix(CLAIM)
    if not (separator and folder and (prefix.startswith("/") or is_claim)):
        raise ValueError(f"{text!r} is no mapping; write /path/in/the/pod=FOLDER or pvc://CLAIM=FOLDER")
    target = Path(folder).expanduser().resolve()
    if not target.is_dir():
        raise ValueError(f"{text!r}: there is no folder {target}")
    return PathMap(prefix if is_claim else prefix.rstrip("/") or "/", target)


def default_maps(manifest: Path, here: Path) -> tuple[PathMap, ...]:
    """Maps the image's models to ./models, and to `models` next to the manifest and above it, as in a clone of the repository."""
    folders = (here, manifest.resolve().parent, manifest.resolve().parent.parent)
    return tuple(PathMap(IMAGE_MODELS, folder / "models") for folder in folders)


def map_path(path: str, maps: Sequence[PathMap]) -> Path:
    """Returns the local path of a pod's absolute path: itself if it exists, else the first mapping that leads to something.

    Raises SourceError with every place that was tried.
    """
    candidates = [Path(path), *(found for entry in maps if (found := _under(path, entry)))]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    tried = ", ".join(dict.fromkeys(map(str, candidates)))
    raise SourceError(f"there is no {tried}; name another path, use hf://org/name, or add --map {path}=FOLDER")


def _under(path: str, entry: PathMap) -> Path | None:
    if path == entry.prefix:
        return entry.folder
    prefix = entry.prefix.rstrip("/") + "/"
    return entry.folder / path.removeprefix(prefix) if path.startswith(prefix) else None


def node_folder(path: str, maps: Sequence[PathMap]) -> Path:
    """Returns the local folder of a node's: what is mapped there, else the same one here."""
    return next((found for entry in maps if (found := _under(path, entry))), Path(path))


def claim_folder(claim: str, maps: Sequence[PathMap], instead: str = "") -> Path:
    """Raises SourceError: there are no PersistentVolumeClaims here. `instead`: what else is possible."""
    for entry in maps:
        if entry.prefix == f"{CLAIM}{claim}":
            return entry.folder
    raise SourceError(
        f"PersistentVolumeClaim {claim!r} needs a cluster; give its content as a folder with --map {CLAIM}{claim}=FOLDER"
        + (f", or {instead}" if instead else "")
    )


def local_model(source: str, maps: Sequence[PathMap]) -> Path | None:
    """Returns where a spec.model.source is on this machine; None for one of the hub. Raises SourceError where nothing is there."""
    if source.startswith(CLAIM):
        claim, _, path = source.removeprefix(CLAIM).partition("/")
        found = claim_folder(claim, maps, "use hf://org/name or file:///path") / path
        if not found.exists():
            raise SourceError(f"there is no {found}")
        return found
    return map_path(source.removeprefix(FILE), maps) if source.startswith(FILE) else None
