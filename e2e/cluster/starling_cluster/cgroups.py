"""A cgroup for each node, in which kubelet makes those of its pods; its members are how a dead run's containers are found."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNIFIED = ROOT / "cgroup.controllers"


def make(name: str) -> None:
    """On version 1 in every hierarchy, on version 2 once, with all controllers handed down."""
    if UNIFIED.exists():
        controllers = " ".join(f"+{controller}" for controller in UNIFIED.read_text().split())
        (ROOT / "cgroup.subtree_control").write_text(controllers)
        (ROOT / name).mkdir(exist_ok=True)
        return
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)
    # A new cpuset is empty, and no process can enter it.
    for file in ("cpuset.cpus", "cpuset.mems"):
        (ROOT / "cpuset" / name / file).write_text((ROOT / "cpuset" / file).read_text())


def members(pattern: str) -> list[int]:
    """Ids of the processes in cgroups whose name matches, and below."""
    files = [file for top in _tops(pattern) for file in top.rglob("cgroup.procs")]
    return sorted({int(pid) for file in files for pid in _read(file).split()})


def remove(pattern: str) -> None:
    """Their processes must have ended."""
    for top in _tops(pattern):
        for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        top.rmdir()


def _hierarchies() -> list[Path]:
    return [ROOT] if UNIFIED.exists() else [path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink()]


def _tops(pattern: str) -> list[Path]:
    return [top for hierarchy in _hierarchies() for top in hierarchy.glob(pattern) if top.is_dir()]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
