"""NetworkPolicies as one nftables table, the same for every node: each packet between pods is forwarded by a node, after the
service proxy has put a pod's address in a Service's place.

The semantics are those of `networking.k8s.io/v1`: a pod that no policy selects for a direction is open in it; one that is selected
takes what any of them allows; answers to what was allowed come back. What a node itself sends (probes) is never dropped.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

TABLE = "starling-policies"
ALWAYS = ""
"""A match that is true of every packet."""


@dataclass(frozen=True)
class Seen:
    """The objects of a cluster that decide who may speak to whom, as the API server gives them."""

    policies: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    namespaces: tuple[Object, ...] = ()

    def pods_of(self, namespace: str) -> Iterator[Object]:
        """Those with an address of their own."""
        for pod in self.pods:
            if pod["metadata"]["namespace"] == namespace and pod.get("status", {}).get("podIP") and not _shares_node(pod):
                yield pod


def ruleset(seen: Seen) -> str:
    """What `nft -f -` takes: it replaces the table in one step."""
    directions = {kind: _chain(seen, kind) for kind in ("Egress", "Ingress")}
    lines = [f"add table ip {TABLE}", f"delete table ip {TABLE}", f"table ip {TABLE} {{"]
    for kind, rules in directions.items():
        lines += [f"  chain {kind.lower()} {{", *(f"    {rule}" for rule in rules), "  }"]
    base = ["type filter hook forward priority filter; policy accept;", "ct state established,related accept"]
    lines += ["  chain forward {", *(f"    {rule}" for rule in [*base, "jump egress", "jump ingress"]), "  }", "}"]
    return "\n".join(lines) + "\n"


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all. Raises `KeyError` for an unknown operator."""
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(_holds(one, labels) for one in selector.get("matchExpressions", []))


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    return {
        "In": labels.get(key) in values,
        "NotIn": key not in labels or labels[key] not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[expression["operator"]]


def _chain(seen: Seen, kind: str) -> Iterator[str]:
    """The rules of one direction. A packet that is allowed returns; one of an isolated pod that is not, is dropped."""
    own = "ip saddr" if kind == "Egress" else "ip daddr"
    for address, policies in _isolated(seen, kind).items():
        for policy, pod in policies:
            for rule in policy["spec"].get(kind.lower(), []):
                for match in _matches_of(seen, policy["metadata"]["namespace"], rule, kind, pod):
                    yield " ".join(f"{own} {address} {match} return".split())
        yield f"{own} {address} drop"


def _isolated(seen: Seen, kind: str) -> dict[str, list[tuple[Object, Object]]]:
    """By address, the policies of this direction that select the pod."""
    found: dict[str, list[tuple[Object, Object]]] = {}
    for policy in seen.policies:
        if kind not in _types(policy["spec"]):
            continue
        for pod in seen.pods_of(policy["metadata"]["namespace"]):
            if matches(policy["spec"].get("podSelector", {}), pod["metadata"].get("labels", {})):
                found.setdefault(pod["status"]["podIP"], []).append((policy, pod))
    return found


def _types(spec: Object) -> list[str]:
    named: list[str] = spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else ["Ingress"])
    return named


def _matches_of(seen: Seen, namespace: str, rule: Object, kind: str, pod: Object) -> Iterator[str]:
    """What a packet has to look like for one rule to allow it."""
    peers = rule.get("from" if kind == "Ingress" else "to")
    side = "ip saddr" if kind == "Ingress" else "ip daddr"
    for peer in peers or [None]:
        others = None if peer is None else list(_pods_of_peer(seen, namespace, peer))
        source = ALWAYS if peer is None else _of_peer(side, peer, others or [])
        if source is None:
            continue
        # A port's name is looked up in the pod that is spoken to.
        targets = [pod] if kind == "Ingress" else (others or [])
        for port in _ports(rule.get("ports") or [], targets):
            yield f"{source} {port}"


def _of_peer(side: str, peer: Object, pods: list[Object]) -> str | None:
    """None for a peer that is nobody now."""
    if block := peer.get("ipBlock"):
        but = block.get("except", [])
        return f"{side} {block['cidr']}" + (f" {side} != {{ {', '.join(but)} }}" if but else "")
    addresses = sorted({pod["status"]["podIP"] for pod in pods})
    return f"{side} {{ {', '.join(addresses)} }}" if addresses else None


def _pods_of_peer(seen: Seen, namespace: str, peer: Object) -> Iterator[Object]:
    """Without a selector of namespaces it means the policy's own."""
    if "ipBlock" in peer:
        return
    for name in _namespaces_of_peer(seen, namespace, peer):
        for pod in seen.pods_of(name):
            if matches(peer.get("podSelector") or {}, pod["metadata"].get("labels", {})):
                yield pod


def _namespaces_of_peer(seen: Seen, namespace: str, peer: Object) -> Iterator[str]:
    selector = peer.get("namespaceSelector")
    if selector is None:
        yield namespace
        return
    for one in seen.namespaces:
        if matches(selector, one["metadata"].get("labels", {})):
            yield one["metadata"]["name"]


def _ports(ports: list[Object], targets: list[Object]) -> Iterable[str]:
    if not ports:
        return [ALWAYS]
    return [_port(port, number) for port in ports for number in _numbers(port, targets)]


def _port(port: Object, number: str) -> str:
    protocol = port.get("protocol", "TCP").lower()
    return f"{protocol} dport {number}" if number else f"ip protocol {protocol}"


def _numbers(port: Object, targets: list[Object]) -> list[str]:
    """Of one entry: a number, a range, none (any port of its protocol), or what the pods give that name to."""
    given = port.get("port")
    if given is None:
        return [ALWAYS]
    if isinstance(given, int):
        return [f"{given}-{port['endPort']}" if "endPort" in port else str(given)]
    declared = (one for pod in targets for container in pod["spec"]["containers"] for one in container.get("ports", []))
    return sorted({str(one["containerPort"]) for one in declared if one.get("name") == given})


def _shares_node(pod: Object) -> bool:
    """Whether its address is the node's, or free for another pod."""
    return bool(pod["spec"].get("hostNetwork")) or pod["status"].get("phase") in ("Succeeded", "Failed")
