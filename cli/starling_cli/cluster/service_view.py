"""An InferenceService as `starling status` shows it. Read leniently: the operator may be newer than the command."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True)
class GroupRow:
    """One group; `nodes` as (pod, host, phase with progress)."""

    name: str
    ready: bool
    topology: str
    restarts: int
    message: str
    nodes: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class ServiceView:
    """One service, ready to print. conditions: (type, status, reason, message)."""

    name: str
    namespace: str
    model: str
    ready: str
    reason: str
    message: str
    wanted: int
    serving: int
    topology: str
    url: str
    age: str
    up_to_date: bool
    revision: str
    conditions: tuple[tuple[str, str, str, str], ...]
    groups: tuple[GroupRow, ...]


def view_of(service: Mapping[str, Any], now: datetime) -> ServiceView:
    """`service` is the object as the API server has it; `now` has a time zone."""
    meta, spec, status = service["metadata"], service.get("spec", {}), service.get("status", {})
    conditions = {entry["type"]: entry for entry in status.get("conditions", ())}
    ready = conditions.get("Ready", {})
    revision = status.get("revision", {})
    return ServiceView(
        name=meta["name"],
        namespace=meta["namespace"],
        model=str(spec.get("model", {}).get("source", "")),
        ready=str(ready.get("status", "Unknown")),
        reason=str(ready.get("reason", "")),
        message=str(ready.get("message", "")),
        wanted=0 if spec.get("suspend") else int(spec.get("replicas", 1)),
        serving=int(status.get("readyReplicas", 0)),
        topology=str(status.get("topology", "")),
        url=str(status.get("url", "")),
        age=age_of(meta.get("creationTimestamp"), now),
        up_to_date=int(status.get("observedGeneration", 0)) == int(meta.get("generation", 0)),
        revision=_revision(revision),
        conditions=tuple(_condition(entry) for entry in conditions.values()),
        groups=tuple(_group(group) for group in status.get("groups", ())),
    )


def _revision(revision: Mapping[str, str]) -> str:
    current, target = revision.get("current", ""), revision.get("target", "")
    return f"{current or 'none'} -> {target}" if target and current != target else current


def _condition(entry: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return str(entry["type"]), str(entry["status"]), str(entry.get("reason", "")), str(entry.get("message", ""))


def _group(group: Mapping[str, Any]) -> GroupRow:
    nodes = tuple(
        (str(node["pod"]), str(node.get("host", "")), " ".join(filter(None, (node.get("phase", ""), node.get("progress", "")))))
        for node in group.get("nodes", ())
    )
    return GroupRow(
        name=str(group["name"]),
        ready=bool(group.get("ready")),
        topology=str(group.get("topology", "")),
        restarts=int(group.get("restarts", 0)),
        message=str(group.get("message", "")),
        nodes=nodes,
    )


def age_of(timestamp: str | None, now: datetime) -> str:
    """Returns an age as kubectl writes it: 42s, 7m, 3h, 5d."""
    if not timestamp:
        return ""
    seconds = int((now - datetime.fromisoformat(timestamp)).total_seconds())
    for size, unit, limit in ((1, "s", 120), (60, "m", 120), (3600, "h", 48)):
        if seconds < size * limit:
            return f"{max(0, seconds) // size}{unit}"
    return f"{seconds // 86400}d"


def utc_now() -> datetime:
    return datetime.now(UTC)
