"""Folders that this machine gives to a run and to its pods."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from starling_cli.local.sources import PathMap


class PodFolders(NamedTuple):
    """A pod's folder for volumes and files, the one in place of /tmp, and its log."""

    folder: Path
    scratch: Path
    log: Path


@dataclass(frozen=True)
class MachineFolders:
    """Folders of a machine: its private one, those of logs and downloads, and the meaning of paths here."""

    folder: Path
    logs: Path
    weights: Path
    maps: tuple[PathMap, ...]
    manifest: str
    _count: Iterator[int] = field(default_factory=itertools.count, init=False)

    def of_pod(self, pod: str) -> PodFolders:
        """Makes a pod's folders. Files that a killed process leaves in its scratch folder are removed with the run."""
        folder, scratch = self.folder / "pods" / pod, self.folder / str(next(self._count))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch.mkdir(mode=0o700)
        return PodFolders(folder, scratch, self.logs / f"{pod}.log")
