"""Reads from a pod's body what decisions need; the body itself is not stored."""

import math
from collections.abc import Iterable, Iterator
from datetime import datetime

from starling_operator.cluster.kinds import GROUP
from starling_operator.plan.observed import Manifest, Pod, RouterPod

# Reasons of states that every container goes through.
_ROUTINE = ("ContainerCreating", "PodInitializing", "Completed")
_REQUIRED_LABELS = ("revision", "role")


def read_pod(body: Manifest) -> Pod:
    metadata, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
    labels = metadata.get("labels", {})
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        group=labels.get(f"{GROUP}/group", ""),
        revision=labels.get(f"{GROUP}/revision", ""),
        number=_ordinal(metadata["name"]),
        owner=next((owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner.get("controller")), ""),
        cluster_node=spec.get("nodeName", ""),
        address=status.get("podIP", ""),
        phase=status.get("phase", "Pending"),
        scheduled=bool(spec.get("nodeName")),
        ready=_condition(body, "Ready").get("status") == "True",
        unready_since=_unready_since(body),
        unlabelled=any(f"{GROUP}/{name}" not in labels for name in _REQUIRED_LABELS),
        created_at=read_time(metadata["creationTimestamp"]),
        deleted_at=_deleted_at(metadata),
        grace_ends_at=read_time(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        drains=_drains(body),
        lost=status.get("reason") == "NodeLost",
        evicted_by_taint=_is_evicted_by_taint(body),
        unreported_since=_unreported_since(body),
        toleration_seconds=_toleration_seconds(spec.get("tolerations", ())),
        restarts=sum(container.get("restartCount", 0) for container in _containers(status)),
        waiting=_waiting(body),
        termination_message=_termination_message(status),
    )


def read_router_pod(body: Manifest) -> RouterPod:
    metadata, status = body["metadata"], body.get("status", {})
    address, phase = status.get("podIP", ""), status.get("phase", "Pending")
    is_running, is_going = phase == "Running" and bool(address), "deletionTimestamp" in metadata
    return RouterPod(name=metadata["name"], uid=metadata["uid"], address=address, is_running=is_running, is_going=is_going)


def read_time(text: str) -> float:
    """Returns the seconds since the epoch of an RFC 3339 time."""
    return datetime.fromisoformat(text).timestamp()


def _ordinal(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0


def _containers(status: Manifest) -> Iterator[Manifest]:
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())


def _condition(body: Manifest, kind: str) -> Manifest:
    conditions = body.get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _deleted_at(metadata: Manifest) -> float | None:
    """Returns when the deletion was requested: deletionTimestamp lies later by the grace period."""
    if "deletionTimestamp" not in metadata:
        return None
    return read_time(metadata["deletionTimestamp"]) - float(metadata.get("deletionGracePeriodSeconds", 0))


def _drains(body: Manifest) -> bool:
    """Returns whether the pod drains. Not a failed one, nor one deleted with less than its grace period, as in a restart."""
    metadata, phase = body["metadata"], body.get("status", {}).get("phase")
    if _ends_with_its_node(body):
        return True
    if "deletionTimestamp" not in metadata or phase in ("Failed", "Succeeded"):
        return False
    full_grace = body.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    disrupted = _condition(body, "DisruptionTarget").get("status") == "True"
    return disrupted or metadata.get("deletionGracePeriodSeconds", 0) >= full_grace


def _ends_with_its_node(body: Manifest) -> bool:
    """Returns whether the kubelet terminated the pod because its node shuts down, and not to free memory or disk."""
    disrupted = _condition(body, "DisruptionTarget")
    by_kubelet = disrupted.get("status") == "True" and disrupted.get("reason") == "TerminationByKubelet"
    return by_kubelet and body["status"].get("reason") != "Evicted"


def _is_evicted_by_taint(body: Manifest) -> bool:
    disrupted = _condition(body, "DisruptionTarget")
    return disrupted.get("status") == "True" and disrupted.get("reason") == "DeletionByTaintManager"


def _unready_since(body: Manifest) -> float | None:
    ready = _condition(body, "Ready")
    return read_time(ready["lastTransitionTime"]) if ready.get("status") == "False" and "lastTransitionTime" in ready else None


def _unreported_since(body: Manifest) -> float | None:
    """Returns since when the node controller has set Ready to False. It gives no reason, and leaves ContainersReady True."""
    marked = not _condition(body, "Ready").get("reason") and _condition(body, "ContainersReady").get("status") == "True"
    return _unready_since(body) if marked else None


def _toleration_seconds(tolerations: Iterable[Manifest]) -> float:
    """Returns how long the pod may stay on a node that is not ready or unreachable: the shortest of its tolerations."""
    found = [entry for entry in tolerations if entry.get("effect", "NoExecute") == "NoExecute"]

    def seconds(key: str) -> float:
        matching = [entry for entry in found if entry.get("key", key) == key]
        return min((float(entry.get("tolerationSeconds", math.inf)) for entry in matching), default=0.0)

    return min(seconds(f"node.kubernetes.io/{taint}") for taint in ("not-ready", "unreachable"))


def _waiting(body: Manifest) -> str:
    """Returns reason and message of the first problem: of a container, of the whole pod, of its scheduling. "" if there is none."""
    status = body.get("status", {})
    for container in _containers(status):
        state = container.get("state", {})
        found = state.get("waiting") or state.get("terminated") or {}
        if found.get("reason", "Completed") not in _ROUTINE:
            return _described(found["reason"], found.get("message") or _exit_code(found))
    if status.get("reason"):
        return _described(status["reason"], status.get("message", ""))
    scheduled = _condition(body, "PodScheduled")
    if scheduled.get("status") == "False":
        return _described(scheduled.get("reason", "Unschedulable"), scheduled.get("message", ""))
    return ""


def _described(reason: str, message: str) -> str:
    return f"{reason}: {message.strip()}" if message.strip() else reason


def _exit_code(terminated: Manifest) -> str:
    return f"exit code {terminated['exitCode']}" if "exitCode" in terminated else ""


def _termination_message(status: Manifest) -> str:
    """Returns the newest termination message of a container, from its present state or the one before."""
    for container in _containers(status):
        for state in (container.get("state", {}), container.get("lastState", {})):
            message = state.get("terminated", {}).get("message", "")
            if message:
                return str(message).strip()
    return ""
