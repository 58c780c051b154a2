"""Resources of the nodes for agents."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from starling_crds.quantity import parse_quantity

from starling_cli.checking.finding import Finding, bad, good

PLAIN = ("cpu", "memory", "pods", "ephemeral-storage")


def node_findings(nodes: Iterable[dict[str, Any]]) -> Iterator[Finding]:
    ready = [node for node in nodes if _is_ready(node) and not node.get("spec", {}).get("unschedulable")]
    if not ready:
        yield bad("nodes", "ready and schedulable", "none", "see `kubectl get nodes`")
        return
    yield good("nodes", "ready and schedulable", str(len(ready)))
    for node in ready:
        yield good("nodes", node["metadata"]["name"], _describe(node["status"].get("allocatable", {})))
    yield good("nodes", "devices", _devices(ready))


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _describe(allocatable: dict[str, str]) -> str:
    memory = parse_quantity(allocatable.get("memory", "0"))
    return f"{allocatable.get('cpu', '?')} CPUs, {memory / 2**30:.1f} GiB for pods"


def _devices(nodes: Iterable[dict[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    for node in nodes:
        for name, quantity in node["status"].get("allocatable", {}).items():
            if name not in PLAIN and "/" in name and str(quantity).isdigit():
                counts[name] += int(quantity)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
    return f"CPUs{', ' if listed else ' only'}{listed}"
