"""A node's service proxy: its iptables rules live and die with the node's namespace."""

from pathlib import Path

from starling_cluster import access, processes
from starling_cluster.control_plane import flags
from starling_cluster.network import Network
from starling_cluster.place import Place

# Zero leaves the machine's own connection tracking limits alone.
UNTOUCHED = (
    "conntrack-max-per-core",
    "conntrack-min",
    "conntrack-tcp-timeout-established",
    "conntrack-tcp-timeout-close-wait",
)


def name(number: int) -> str:
    return f"n{number}-proxy"


def start(place: Place, kube: Path, net: Network, number: int) -> None:
    options = {
        "kubeconfig": str(access.kubeconfig(place, access.PROXY)),
        "hostname-override": f"n{number}",
        "proxy-mode": "iptables",
        "cluster-cidr": net.pods,
        **dict.fromkeys(UNTOUCHED, "0"),
    }
    processes.spawn(place, name(number), [str(kube), "kube-proxy", *flags(options)], net.name(number))
