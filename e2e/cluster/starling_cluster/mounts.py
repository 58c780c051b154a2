"""What a thin image lacks, mounted into it read-only: this machine's programs, the checkout, the environment of this Python.

The mounts are part of how the nodes start any container, so a pod needs no volume for them, and there is no hostPath that a
restricted namespace would refuse. Other images do not notice: the machine's programs lie in a folder that only the links of a
thin image lead to.
"""

import sys
from pathlib import Path

from starling_cluster import cache, kernels

MACHINE = Path("/.machine")
KERNELS = MACHINE / "kernels"
SYSTEM = (Path("/usr"), Path("/etc/alternatives"), Path("/etc/ld.so.cache"), Path("/etc/ssl"))


def all_of_them() -> list[dict[str, object]]:
    """As an OCI specification names them."""
    places = {path: MACHINE / path.relative_to("/") for path in SYSTEM}
    places |= {path: path for path in project()}
    places[kernels.folder()] = KERNELS
    return [
        {"destination": str(inside), "type": "bind", "source": str(outside), "options": ["rbind", "ro"]}
        for outside, inside in places.items()
        if outside.exists()
    ]


def project() -> list[Path]:
    """The checkout, the environment and its interpreter, each at its own path; none that lies in another."""
    wanted = {cache.ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    known = {*SYSTEM, *wanted}
    return sorted(path for path in wanted if not any(path.is_relative_to(other) for other in known - {path}))
