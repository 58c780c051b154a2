"""Health of cluster nodes from which a taint evicts a pod. Nodes are read only then, and never listed.

The taint alone does not say whether the node is gone. An administrator's NoExecute taint drains a live node, whose pods drain their
streams; on a dead one nobody ends them. Where nodes may not be read (an installation for some namespaces) only the pod is known.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from starling_operator.cluster.kinds import NODE
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.plan.observed import Manifest, Pod
from starling_operator.watch.pods import read_time

READ_PERIOD = 4.0
KILL_OVERDUE_SECONDS = 30.0
"""Seconds after the end of a pod's grace period. A kubelet that lives has killed the pod by then."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """down_since: seconds since the epoch. None: the node works, by its kubelet's word. 0: there is no such node."""

    down_since: float | None


class Nodes:
    """Reads each node at most every READ_PERIOD seconds, and only while a taint evicts one of our pods from it."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[str, tuple[float, NodeHealth | None]] = {}
        self._may_read = True

    async def refresh(self, pods: Iterable[Pod]) -> None:
        """Reads the nodes that are due. Raises KubeError."""
        for name in {pod.cluster_node for pod in pods if pod.evicted_by_taint and pod.cluster_node}:
            read_at, _ = self._known.get(name, (-READ_PERIOD, None))
            if time.monotonic() - read_at >= READ_PERIOD:
                self._known[name] = (time.monotonic(), await self._read(name))

    def with_lost(self, pods: Iterable[Pod], now: float) -> tuple[Pod, ...]:
        """Returns the pods, with `lost` set on those that a taint evicts from a node that is gone."""
        return tuple(replace(pod, lost=pod.lost or self._is_lost(pod, now)) if pod.evicted_by_taint else pod for pod in pods)

    def _is_lost(self, pod: Pod, now: float) -> bool:
        return pod.cluster_node in self._known and is_lost(pod, self._known[pod.cluster_node][1], now)

    async def _read(self, name: str) -> NodeHealth | None:
        """Returns None where nodes may not be read."""
        try:
            return read_health(await self._kube.get(NODE.path(None, name)))
        except KubeError as error:
            if error.status == 404:
                return NodeHealth(down_since=0.0)
            if error.status != 403:
                raise
            if self._may_read:
                log.info("nodes may not be read, so that a lost one is known by its pods alone: %s", error)
            self._may_read = False
            return None


def read_health(node: Manifest) -> NodeHealth:
    """Reads the Ready condition, which the node controller sets to Unknown when the kubelet falls silent."""
    conditions = node.get("status", {}).get("conditions", ())
    ready = next((condition for condition in conditions if condition["type"] == "Ready"), {"status": "Unknown"})
    if ready["status"] == "True":
        return NodeHealth(down_since=None)
    return NodeHealth(down_since=read_time(ready["lastTransitionTime"]) if "lastTransitionTime" in ready else 0.0)


def is_lost(pod: Pod, health: NodeHealth | None, now: float) -> bool:
    """Returns whether the pod's node is gone. Without `health` the node controller's mark decides, or that nothing ends the pod."""
    down_since = pod.unreported_since if health is None else health.down_since
    if health is not None or down_since is not None:
        # A kubelet that is restarted is silent for a moment.
        return down_since is not None and now - down_since >= pod.toleration_seconds
    silent = pod.report_age is None or pod.report_age > KILL_OVERDUE_SECONDS
    return silent and pod.grace_ends_at is not None and now - pod.grace_ends_at > KILL_OVERDUE_SECONDS
