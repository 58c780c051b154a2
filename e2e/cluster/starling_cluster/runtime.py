"""A node's containerd: its own store, sockets and pod network."""

import json
import subprocess
from pathlib import Path
from typing import Any

from starling_cluster import images, mounts, processes
from starling_cluster.network import Network
from starling_cluster.packages import CNI_PROGRAMS
from starling_cluster.place import Place

# `restrict_oom_score_adj`: a machine without CAP_SYS_RESOURCE cannot make a container less likely to be killed than itself.
CONFIG = """version = 2
root = "{folder}/containerd"
state = "{folder}/state"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{folder}/container.json"
"""


def name(number: int) -> str:
    """Of the program. What it starts, the shims of containers, carries it too."""
    return f"n{number}-containerd"


def start(place: Place, net: Network, number: int) -> None:
    """Starts it in the node's namespace; it answers a moment later."""
    folder = place.make(f"n{number}")
    (place.make(f"n{number}", "cni") / "pods.conflist").write_text(json.dumps(_pod_network(folder, net, number), indent=2))
    (folder / "container.json").write_text(json.dumps(_container()))
    config = folder / "containerd.toml"
    config.write_text(CONFIG.format(folder=folder, pause=images.PAUSE, cni=CNI_PROGRAMS))
    processes.spawn(place, name(number), ["containerd", "-c", str(config)], net.name(number))


def wait_until_answering(place: Place, number: int) -> None:
    log = place.directory / "log" / f"{name(number)}.log"
    command = ["ctr", "-a", str(place.node(number) / "containerd.sock"), "version"]
    processes.wait_for(
        f"containerd of node {number}",
        lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0,
        log,
    )


def _container() -> dict[str, Any]:
    """What every container starts from: containerd's own default, and the mounts of thin images."""
    done = subprocess.run(["ctr", "oci", "spec"], capture_output=True, text=True, check=True)
    specification: dict[str, Any] = json.loads(done.stdout)
    specification["mounts"] += mounts.all_of_them()
    return specification


def _pod_network(folder: Path, net: Network, number: int) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": str(folder / "addresses"),
        "ranges": [[{"subnet": net.pods_of(number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    # Two pods of one node speak by way of the node too, not over a bridge: what it forwards, it can filter.
    cable = {"type": "ptp", "ipMasq": False, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": net.name(number), "plugins": [cable, ports]}
