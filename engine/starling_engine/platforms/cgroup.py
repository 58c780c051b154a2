"""CPU and memory limits of the container that this process runs in, from cgroup v2 or v1. Imports no torch.

os.cpu_count() and /proc/meminfo show the whole machine; its cgroup says what a container may use. A limit of any cgroup above also
binds, so the smallest on the way to the root counts.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_V1 = 1 << 60
"""Version 1 says "no limit" with a number near the largest one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the cgroup; None where it sets none. Memory in bytes, CPUs may be a fraction."""

    cpus: float | None = None
    memory: int | None = None
    memory_used: int | None = None
    """Bytes in use that the kernel cannot take back by itself (no inactive page cache)."""


def read_limits(root: Path = Path("/")) -> Limits:
    """Returns the limits of this process. `root` holds "proc" and "sys"; tests give another one."""
    groups = _own_groups(root / "proc/self/cgroup")
    base = root / "sys/fs/cgroup"
    if (base / "cgroup.controllers").exists():
        return _read_v2(list(_upwards(base, groups.get("", "/"))))
    return _read_v1(
        list(_upwards(base / "cpu", groups.get("cpu", "/"))), list(_upwards(base / "memory", groups.get("memory", "/")))
    )


def cpu_limit(limits: Limits | None = None) -> int:
    """Returns the CPUs that this process may keep busy, and so its threads: its affinity, cut by the cgroup's quota; at least 1."""
    quota = (limits or read_limits()).cpus
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def _own_groups(path: Path) -> dict[str, str]:
    """Returns the path of this process's cgroup for each controller ("" for version 2's only hierarchy)."""
    groups = {}
    for line in _read(path).splitlines():
        _, controllers, group = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = group
    return groups


def _upwards(base: Path, group: str) -> Iterator[Path]:
    """Yields the group's folder and those above it, up to `base`: a container may see its own group there."""
    folder = base / group.strip("/")
    while folder != base:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield base


def _read_v2(folders: list[Path]) -> Limits:
    cpus, limits = [], []
    for folder in folders:
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cpus.append(int(quota) / int(period))
        if (limit := _integer(folder / "memory.max")) is not None:
            limits.append((limit, folder))
    used = [_used(folder, "memory.current", "inactive_file") for _, folder in limits]
    return _tightest(cpus, [limit for limit, _ in limits], used)


def _read_v1(cpu_folders: list[Path], memory_folders: list[Path]) -> Limits:
    cpus, limits = [], []
    for folder in cpu_folders:
        quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            cpus.append(quota / period)
    for folder in memory_folders:
        limit = _integer(folder / "memory.limit_in_bytes")
        if limit is not None and limit < UNLIMITED_V1:
            limits.append((limit, folder))
    used = [_used(folder, "memory.usage_in_bytes", "total_inactive_file") for _, folder in limits]
    return _tightest(cpus, [limit for limit, _ in limits], used)


def _tightest(cpus: list[float], limits: list[int], used: list[int]) -> Limits:
    """Takes the memory limit of the group with the least room left, which need not have the smallest limit."""
    if not limits:
        return Limits(min(cpus, default=None))
    limit, held = min(zip(limits, used, strict=True), key=lambda pair: pair[0] - pair[1])
    return Limits(min(cpus, default=None), limit, held)


def _used(folder: Path, usage: str, inactive: str) -> int:
    statistics = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return max(0, (_integer(folder / usage) or 0) - int(statistics.get(inactive, 0)))


def _integer(path: Path) -> int | None:
    """Returns the number in the file; None for "max", and where there is no such file."""
    text = _read(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str:
    """Returns "" for a missing or unreadable file: the kernel and the container decide which files exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
