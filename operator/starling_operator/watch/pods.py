"""A pod's body, read for what decisions need of it; the body itself is not kept."""

import math
from collections.abc import Iterable, Iterator
from datetime import datetime

from starling_operator.cluster.kinds import GROUP
from starling_operator.plan.observed import Manifest, Pod

# What every container goes through; it is no trouble.
_ROUTINE = ("ContainerCreating", "PodInitializing", "Completed")
_NEEDED = ("revision", "role")


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
        host=spec.get("nodeName", ""),
        address=status.get("podIP", ""),
        phase=status.get("phase", "Pending"),
        scheduled=bool(spec.get("nodeName")),
        ready=_condition(body, "Ready").get("status") == "True",
        unlabelled=any(f"{GROUP}/{name}" not in labels for name in _NEEDED),
        created_at=read_time(metadata["creationTimestamp"]),
        deleted_at=_deleted_at(metadata),
        due_at=read_time(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        drains=_drains(body),
        lost=status.get("reason") == "NodeLost",
        evicted=_is_evicted(body),
        unreported_since=_unreported_since(body),
        tolerates=_tolerates(spec.get("tolerations", ())),
        restarts=sum(container.get("restartCount", 0) for container in _containers(status)),
        waiting=_trouble(body),
        last_log=_last_log(status),
    )


def read_time(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time."""
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
    """deletionTimestamp is when the pod has to be gone: the grace period after it was asked for."""
    if "deletionTimestamp" not in metadata:
        return None
    return read_time(metadata["deletionTimestamp"]) - float(metadata.get("deletionGracePeriodSeconds", 0))


def _drains(body: Manifest) -> bool:
    """Not a pod that has failed, nor one that is deleted with less than its own grace: so the operator restarts a broken group."""
    metadata, phase = body["metadata"], body.get("status", {}).get("phase")
    if _is_shut_down(body):
        return True
    if "deletionTimestamp" not in metadata or phase in ("Failed", "Succeeded"):
        return False
    whole = body.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    disrupted = _condition(body, "DisruptionTarget").get("status") == "True"
    return disrupted or metadata.get("deletionGracePeriodSeconds", 0) >= whole


def _is_shut_down(body: Manifest) -> bool:
    """By its kubelet, which ends with its node and deletes no pod: it is said when the pod has ended. Not for want of memory."""
    disrupted = _condition(body, "DisruptionTarget")
    by_kubelet = disrupted.get("status") == "True" and disrupted.get("reason") == "TerminationByKubelet"
    return by_kubelet and body["status"].get("reason") != "Evicted"


def _is_evicted(body: Manifest) -> bool:
    disrupted = _condition(body, "DisruptionTarget")
    return disrupted.get("status") == "True" and disrupted.get("reason") == "DeletionByTaintManager"


def _unreported_since(body: Manifest) -> float | None:
    """A kubelet gives a reason for an unready pod, and calls its containers unready too; the node controller does neither."""
    ready, containers = _condition(body, "Ready"), _condition(body, "ContainersReady")
    marked = ready.get("status") == "False" and not ready.get("reason") and containers.get("status") == "True"
    return read_time(ready["lastTransitionTime"]) if marked and "lastTransitionTime" in ready else None


def _tolerates(tolerations: Iterable[Manifest]) -> float:
    """As Kubernetes takes them: of several tolerations of one trouble the shortest; one without a time is for ever."""
    found = [entry for entry in tolerations if entry.get("effect", "NoExecute") == "NoExecute"]

    def seconds(key: str) -> float:
        matching = [entry for entry in found if entry.get("key", key) == key]
        return min((float(entry.get("tolerationSeconds", math.inf)) for entry in matching), default=0.0)

    return min(seconds(f"node.kubernetes.io/{trouble}") for trouble in ("not-ready", "unreachable"))


def _trouble(body: Manifest) -> str:
    """The first trouble there is: of a container, of the whole pod, of its placing."""
    status = body.get("status", {})
    for container in _containers(status):
        state = container.get("state", {})
        found = state.get("waiting") or state.get("terminated") or {}
        if found.get("reason", "Completed") not in _ROUTINE:
            return _said(found["reason"], found.get("message") or _exit_code(found))
    if status.get("reason"):
        return _said(status["reason"], status.get("message", ""))
    placed = _condition(body, "PodScheduled")
    if placed.get("status") == "False":
        return _said(placed.get("reason", "Unschedulable"), placed.get("message", ""))
    return ""


def _said(reason: str, message: str) -> str:
    return f"{reason}: {message.strip()}" if message.strip() else reason


def _exit_code(terminated: Manifest) -> str:
    return f"exit code {terminated['exitCode']}" if "exitCode" in terminated else ""


def _last_log(status: Manifest) -> str:
    """The termination message of the newest end of a container, in its present state or the one before."""
    for container in _containers(status):
        for state in (container.get("state", {}), container.get("lastState", {})):
            message = state.get("terminated", {}).get("message", "")
            if message:
                return str(message).strip()
    return ""
