"""The network of nodes: a bridge in the machine's own namespace, and a namespace with an address for each node.

Names and addresses come from one number, so several clusters live side by side. The bridge is the reservation of its number,
and its alias says which folder it belongs to: a cluster whose folder is lost can still be taken down.
"""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from starling_cluster import cache
from starling_cluster.errors import HarnessError
from starling_cluster.place import Place

MOST = 16
# A folder that every machine has can be locked too: nothing is left behind.
LOCK = Path("/run")
NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class Network:
    """The names and addresses of cluster number `index`."""

    index: int

    @property
    def bridge(self) -> str:
        return f"star{self.index}"

    @property
    def gateway(self) -> str:
        """The machine's own address, where the API server and DNS listen."""
        return f"10.200.{self.index}.1"

    @property
    def pods(self) -> str:
        return f"10.{220 + self.index}.0.0/16"

    def name(self, node: int) -> str:
        """Of a node's namespace, cgroups and CNI network."""
        return f"{self.bridge}-n{node}"

    @property
    def every_name(self) -> str:
        """A pattern for the names of all nodes."""
        return f"{self.bridge}-n*"

    def address(self, node: int) -> str:
        return f"10.200.{self.index}.{10 + node}"

    def pods_of(self, node: int) -> str:
        return f"10.{220 + self.index}.{node}.0/24"


def reserve(place: Place) -> Network:
    """Takes the first free number and makes its bridge."""
    with cache.lock(LOCK):
        taken = bridges()
        free = next((index for index in range(MOST) if index not in taken), None)
        if free is None:
            raise HarnessError(
                f"{MOST} clusters run on this machine; `down` one of {sorted(str(folder) for folder in taken.values())}"
            )
        network = Network(free)
        _ip("link", "add", network.bridge, "type", "bridge")
        _ip("link", "set", network.bridge, "alias", str(place.directory))
    _ip("address", "add", f"{network.gateway}/24", "dev", network.bridge)
    _ip("link", "set", network.bridge, "up")
    return network


def connect(network: Network, node: int, nodes: range) -> None:
    """Makes a node's namespace, its cable to the bridge, and the routes to and from the other nodes' pods."""
    name, cable = network.name(node), f"{network.bridge}-v{node}"
    _ip("netns", "add", name)
    _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", cable, "master", network.bridge, "up")
    inside = ("-netns", name)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "address", "add", f"{network.address(node)}/24", "dev", "eth0")
    _ip(*inside, "route", "add", "default", "via", network.gateway)
    for other in nodes:
        if other != node:
            _ip(*inside, "route", "add", network.pods_of(other), "via", network.address(other))
    _ip("route", "add", network.pods_of(node), "via", network.address(node))
    _run("nsenter", f"--net={NAMESPACES / name}", "sysctl", "-qw", "net.ipv4.ip_forward=1")


def switch(network: Network, node: int, to: str) -> None:
    """Pulls a node's cable (`down`) or puts it back (`up`)."""
    _ip("link", "set", f"{network.bridge}-v{node}", to)


def bridges() -> dict[int, Path | None]:
    """The folder of each cluster that has a bridge; None when whoever made it died before it could say."""
    found: dict[int, Path | None] = {}
    for link in json.loads(_ip("-json", "link", "show", "type", "bridge") or "[]"):
        if match := re.fullmatch(r"star(\d+)", link.get("ifname", "")):
            found[int(match[1])] = Path(link["ifalias"]) if link.get("ifalias") else None
    return found


def remove(network: Network) -> None:
    """Cables and namespaces first: the bridge keeps the number reserved until all else is gone."""
    # A cable would go with its namespace, but some time after: the next cluster of this number would find its name taken.
    for cable in re.findall(rf"{network.bridge}-v\d+", _ip("-brief", "link", "show", "type", "veth")):
        _ip("link", "delete", cable)
    if NAMESPACES.is_dir():
        for name in sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(f"{network.bridge}-n")):
            _ip("netns", "delete", name)
    _ip("link", "delete", network.bridge)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
