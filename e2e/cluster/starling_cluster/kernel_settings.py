"""Settings of this machine's kernel that kubelets change: noted before the first node starts, put back after the last."""

import json
from pathlib import Path

from starling_cluster import cache

_KERNEL = Path("/proc/sys")
# What a kubelet sets if it is not as it wants it.
_NAMES = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def note() -> None:
    """Does nothing while some are noted: a cluster that runs has changed them."""
    if not _noted().exists():
        _noted().parent.mkdir(parents=True, exist_ok=True)
        _noted().write_text(json.dumps({name: (_KERNEL / name).read_text() for name in _NAMES if (_KERNEL / name).exists()}))


def put_back() -> None:
    if not _noted().exists():
        return
    for name, value in json.loads(_noted().read_text()).items():
        if (_KERNEL / name).read_text() != value:
            (_KERNEL / name).write_text(value)
    _noted().unlink()


def _noted() -> Path:
    return cache.folder() / "kernel-settings.json"
