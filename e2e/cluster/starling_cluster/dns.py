"""Cluster DNS: CoreDNS beside the control plane, behind the Service that pods expect. It knows the cluster's names only."""

from pathlib import Path
from typing import Any

from starling_cluster import access, control_plane, processes
from starling_cluster.network import Network
from starling_cluster.place import Place

SERVICE = "10.96.0.10"
DOMAIN = "cluster.local"
NAME = {"name": "kube-dns", "namespace": "kube-system"}
# As kubeadm sets it: answers about the cluster are not cached by the server, and clients may keep them 30 s.
COREFILE = """.:53 {{
  bind {address}
  errors
  kubernetes {domain} in-addr.arpa {{
    kubeconfig {kubeconfig}
    ttl 30
  }}
}}
"""


def start(place: Place, kube: Path, net: Network) -> None:
    kubeconfig = access.kubeconfig(place, access.ADMIN)
    corefile = place.directory / "Corefile"
    corefile.write_text(COREFILE.format(address=net.gateway, domain=DOMAIN, kubeconfig=kubeconfig))
    processes.spawn(place, "coredns", [str(kube), "coredns", "-conf", str(corefile)])
    control_plane.kubectl(place, "apply", "-f", "-", document=_service(net))


def _service(net: Network) -> list[dict[str, Any]]:
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    labels = {"kubernetes.io/service-name": NAME["name"]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": NAME, "spec": {"clusterIP": SERVICE, "ports": ports}}
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**NAME, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [net.gateway], "conditions": {"ready": True}}],
        "ports": ports,
    }
    return [service, endpoints]
