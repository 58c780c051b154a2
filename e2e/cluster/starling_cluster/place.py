"""A cluster's folder: where each file of it lies, and the record by which a later run knows whether it is still wanted."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from starling_cluster import cache
from starling_cluster.errors import HarnessError

# Unix sockets have paths of at most 107 bytes, and kubelet's longest below this folder takes 40.
LONGEST_PATH = 65

Mode = Literal["apiserver", "nodes"]


@dataclass(frozen=True)
class Place:
    """The folder of one cluster."""

    directory: Path

    @property
    def record(self) -> Path:
        return self.directory / "state.json"

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    @property
    def kubectl(self) -> Path:
        return self.directory / "bin" / "kubectl"

    def node(self, number: int) -> Path:
        return self.directory / f"n{number}"

    def make(self, *names: str) -> Path:
        """A folder below, made if need be."""
        folder = self.directory.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class Owner:
    """The process for which a cluster runs. The start time tells it from a later process with the same id."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Owner":
        started = _start_time(pid)
        if started is None:
            raise HarnessError(f"--owner: there is no process {pid}")
        return cls(pid, started)

    @property
    def lives(self) -> bool:
        return _start_time(self.pid) == self.started


@dataclass(frozen=True)
class State:
    """What `state.json` holds."""

    mode: Mode
    ready: bool = False
    server: str = ""
    nodes: int = 0
    network: int | None = None
    owner: Owner | None = None

    def write(self, place: Place) -> None:
        scratch = place.record.with_suffix(".new")
        scratch.write_text(json.dumps(asdict(self), indent=2) + "\n")
        scratch.replace(place.record)


def read(place: Place) -> State | None:
    """None where no cluster was begun, or its folder is gone."""
    try:
        found: dict[str, Any] = json.loads(place.record.read_text())
    except FileNotFoundError:
        return None
    owner = found.pop("owner")
    return State(**found, owner=Owner(**owner) if owner else None)


def is_dead(place: Place) -> bool:
    """Whether nobody can want this cluster: its folder or owner is gone, or whoever was starting it died half-way."""
    state = read(place)
    if state is None or (state.owner is not None and not state.owner.lives):
        return True
    return not state.ready and not cache.is_locked(place.directory)


def parse(directory: str) -> Place:
    """Raises `HarnessError` for a folder whose name the programs of a cluster cannot take."""
    path = Path(directory).absolute()
    if any(character.isspace() for character in str(path)):
        raise HarnessError(f"DIR must have no spaces, got {str(path)!r}")
    if len(str(path)) > LONGEST_PATH:
        raise HarnessError(f"DIR has {len(str(path))} characters; Unix sockets below it leave room for {LONGEST_PATH}: {path}")
    return Place(path)


def _start_time(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and brackets. None for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
