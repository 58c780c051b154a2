"""The images that the Dockerfiles describe, built and brought to the nodes of a cluster of our own."""

import shutil
import subprocess
from pathlib import Path

from e2e.under_test import HARNESS, ROOT

OPERATOR, AGENT = "localhost/starling-operator:built", "localhost/starling-agent:built"
ROOM = 20e9
"""Bytes of disk. An agent with CUDA's libraries has six gigabytes, and lies in podman's store, packed and unpacked on a node."""


def build_and_load(folder: Path) -> None:
    """The operator's image to every node of the cluster in `folder`, the agent's to the first. Raises `AssertionError`."""
    free = shutil.disk_usage(folder).free
    # A full disk would end etcd, and every scenario with it.
    assert free > ROOM, f"images need {ROOM / 1e9:.0f} GB of disk, and {free / 1e9:.0f} GB are free"
    harness("image", "build", "--tag", OPERATOR, "--file", str(ROOT / "Dockerfile.operator"))
    harness("image", "load", str(folder), OPERATOR)
    # torch as the package index has it: PyTorch's own index, with the smaller wheels, cannot be reached from everywhere.
    arguments = ("--build-arg", "TORCH_BACKEND=", "--build-arg", "KERNELS=this-cpu")
    harness("image", "build", "--tag", AGENT, "--file", str(ROOT / "Dockerfile.agent"), *arguments)
    harness("image", "load", str(folder), AGENT, "--node", "1")


def harness(*arguments: str) -> str:
    """Its output. Scenarios that run beside it get the processors first."""
    done = subprocess.run(["nice", "-n", "19", *HARNESS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
