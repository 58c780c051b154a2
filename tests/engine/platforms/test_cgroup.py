"""Limits of a container, from both versions of cgroups, in the layouts that machines and containers show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from starling_engine.platforms.cgroup import Limits, cpu_limit, read_limits

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


V2 = {"sys/fs/cgroup/cgroup.controllers": "cpu memory", "proc/self/cgroup": "0::/"}
V1 = {"proc/self/cgroup": "4:memory:/pod\n2:cpu,cpuacct:/pod\n1:name=systemd:/pod\n0::/"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, Limits(), id="no cgroups"),
        pytest.param(V2, Limits(), id="v2 without limits"),
        pytest.param(
            {
                **V2,
                "sys/fs/cgroup/cpu.max": "150000 100000",
                "sys/fs/cgroup/memory.max": str(4 * GIB),
                "sys/fs/cgroup/memory.current": str(3 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}",
            },
            Limits(1.5, 4 * GIB, GIB),
            id="v2 as a container sees it",
        ),
        pytest.param({**V2, "sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"}, Limits(), id="v2 max"),
        pytest.param(
            {
                **V2,
                "proc/self/cgroup": "0::/kubepods/pod1/main",
                "sys/fs/cgroup/kubepods/cpu.max": "800000 100000",
                "sys/fs/cgroup/kubepods/pod1/cpu.max": "200000 100000",
                "sys/fs/cgroup/kubepods/pod1/main/cpu.max": "max 100000",
                "sys/fs/cgroup/kubepods/pod1/memory.max": str(8 * GIB),
                "sys/fs/cgroup/kubepods/pod1/memory.current": str(7 * GIB),
                "sys/fs/cgroup/kubepods/pod1/main/memory.max": str(4 * GIB),
                "sys/fs/cgroup/kubepods/pod1/main/memory.current": str(GIB),
            },
            Limits(2.0, 8 * GIB, 7 * GIB),
            id="v2 on the machine: the group with the least room decides",
        ),
        pytest.param(
            {
                **V2,
                "proc/self/cgroup": "0::/not/shown/here",
                "sys/fs/cgroup/cpu.max": "100000 100000",
                "sys/fs/cgroup/memory.max": str(GIB),
            },
            Limits(1.0, GIB, 0),
            id="v2 in a container with the machine's path",
        ),
        pytest.param(
            {**V2, "proc/self/cgroup": "0::/../..", "sys/fs/cgroup/memory.max": str(GIB)},
            Limits(None, GIB, 0),
            id="v2 moved after its namespace was made",
        ),
        pytest.param(
            {
                **V1,
                "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/pod/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            },
            Limits(2.5, 2 * GIB, GIB // 2),
            id="v1",
        ),
        pytest.param(
            {
                **V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            },
            Limits(),
            id="v1 without limits",
        ),
    ],
)
def test_reads_limits(files: dict[str, str], expected: Limits, tmp_path: Path) -> None:
    assert read_limits(write(tmp_path, files)) == expected


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (0.5, 1), (1.0, 1), (2.9, 2), (16.0, 4)])
def test_threads_fit_the_quota_and_the_affinity(quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5, 7})
    assert cpu_limit(Limits(cpus=quota)) == threads


def test_this_process_has_limits_that_can_be_read() -> None:
    assert cpu_limit() >= 1


def test_needs_no_torch() -> None:
    code = "import sys; import starling_engine.platforms.cgroup; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
