"""The programs that nodes and images need, and the Debian packages that bring them."""

import os
import shutil
import subprocess
from pathlib import Path

from starling_cluster.errors import HarnessError

CONTROL_PLANE = {"openssl": "openssl"}
NODES = {
    **CONTROL_PLANE,
    "ip": "iproute2",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "containerd": "containerd",
    "runc": "runc",
    "gcc": "gcc",
}
IMAGES = {"podman": "podman", "buildah": "buildah", "debootstrap": "debootstrap"}
# Brings plugins, no program that is on the PATH.
CNI = "containernetworking-plugins"
CNI_PROGRAMS = Path("/usr/lib/cni")
INSTALL = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends")


def require(programs: dict[str, str], root: bool) -> None:
    """Raises with everything that is missing, not only the first."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise HarnessError(f"not on the PATH: {', '.join(missing)}; `python e2e/cluster setup` installs them on Debian and Ubuntu")
    if root and not CNI_PROGRAMS.is_dir():
        raise HarnessError(f"no {CNI_PROGRAMS}; `python e2e/cluster setup` installs the package {CNI}")
    if root and os.geteuid() != 0:
        raise HarnessError("nodes and images need root, for namespaces and mounts; an API server alone does not")


def install() -> None:
    """Does nothing when all are there."""
    needed = {**NODES, **IMAGES}
    missing = sorted({package for program, package in needed.items() if shutil.which(program) is None})
    if not CNI_PROGRAMS.is_dir():
        missing.append(CNI)
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise HarnessError(f"install these yourself: {', '.join(missing)} (here it takes root, and apt-get)")
    names = " ".join(missing)
    said = "they stay, with the services that Debian switches on for them"
    print(f"installing {names}: {said}, until `apt-get purge --autoremove {names}`", flush=True)
    for command in (("apt-get", "update", "--quiet"), (*INSTALL, *missing)):
        if subprocess.run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=False).returncode != 0:
            raise HarnessError(f"{' '.join(command)} failed; see its output above")
