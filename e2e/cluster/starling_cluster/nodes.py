"""A whole cluster: the control plane on the bridge's address, cluster DNS, and nodes."""

from pathlib import Path

from starling_cluster import control_plane, dns, enforcement, images, kubelet, network, processes, proxy, runtime
from starling_cluster.control_plane import Endpoint
from starling_cluster.errors import HarnessError
from starling_cluster.place import Place

API_PORT = 6443
MOST = 20


def start_all(place: Place, kube: Path, count: int) -> tuple[Endpoint, int]:
    """Starts everything; returns the API server's endpoint and the network's number when all nodes are ready."""
    if not 1 <= count <= MOST:
        raise HarnessError(f"--nodes must be 1 to {MOST}, got {count}")
    numbers = range(1, count + 1)
    net = network.reserve(place)
    endpoint = Endpoint(net.gateway, API_PORT)
    for number in numbers:
        network.connect(net, number, numbers)
        runtime.start(place, net, number)
    made = control_plane.start(place, kube, endpoint, numbers)
    for number in numbers:
        kubelet.start(place, kube, net, number)
        proxy.start(place, kube, net, number)
    control_plane.start_scheduler(place, kube)
    dns.start(place, kube, net)
    enforcement.start(place, net, numbers)
    control_plane.start_controllers(place, kube, made, {"allocate-node-cidrs": "true", "cluster-cidr": net.pods})
    for number in numbers:
        runtime.wait_until_answering(place, number)
    images.load_own(place, numbers)
    wait_until_ready(place, numbers)
    return endpoint, net.index


def wait_until_ready(place: Place, numbers: range) -> None:
    processes.wait_for(
        f"{len(numbers)} ready nodes", lambda: _are_ready(place, len(numbers)), place.directory / "log" / "n1-kubelet.log"
    )


def _are_ready(place: Place, count: int) -> bool:
    """A server that does not answer at this moment has none."""
    conditions = "jsonpath={range .items[*]}{.status.conditions[?(@.type=='Ready')].status} {end}"
    try:
        return control_plane.kubectl(place, "get", "nodes", "-o", conditions).split().count("True") == count
    except HarnessError:
        return False
