"""A node's kubelet, with every path that it writes below the cluster's folder."""

import json
from pathlib import Path

from starling_cluster import access, cgroups, dns, processes
from starling_cluster.control_plane import flags
from starling_cluster.network import Network
from starling_cluster.place import Place


def name(number: int) -> str:
    """Of the program, for logs and for `kill-kubelet`."""
    return f"n{number}-kubelet"


def start(place: Place, kube: Path, net: Network, number: int) -> None:
    folder = place.make(f"n{number}", "kubelet")
    cgroups.make(net.name(number))
    configuration = folder.parent / "kubelet.json"
    configuration.write_text(json.dumps(_configuration(place, net, number), indent=2))
    options = {
        "config": str(configuration),
        "kubeconfig": str(access.kubeconfig(place, access.node_user(number))),
        "root-dir": str(folder),
        "cert-dir": str(folder / "pki"),
        "hostname-override": f"n{number}",
        "node-ip": net.address(number),
    }
    processes.spawn(place, name(number), [str(kube), "kubelet", *flags(options)], net.name(number))


def _configuration(place: Place, net: Network, number: int) -> dict[str, object]:
    folder = place.node(number)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{net.name(number)}",
        "failSwapOn": False,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(place.directory / "pki" / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [dns.SERVICE],
        "clusterDomain": dns.DOMAIN,
        # Not the machine's: its servers and search names cannot be reached from a pod.
        "resolvConf": "",
        "podLogsDir": str(folder / "logs"),
        "volumePluginDir": str(folder / "plugins"),
        # The disk is the whole machine's: how full it is says nothing about this node.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "nodeStatusUpdateFrequency": "1s",
        "nodeLeaseDurationSeconds": 8,
    }
