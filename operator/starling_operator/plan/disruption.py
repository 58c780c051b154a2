"""The PodDisruptionBudget: how many pods evictions may take now. The operator opens and closes it.

Kubernetes counts pods, but groups serve: the first pod that is evicted takes its whole group along. So evictions may take one pod
for each group that may go. The other pods of that group are being deleted by then, and nobody is refused to evict them.

The budget is `minAvailable`. For `maxUnavailable` Kubernetes looks at the owners of all pods, and the owner of those that drain is
gone.
"""

from collections.abc import Container, Sequence

from starling_operator.plan import labels
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.labels import child
from starling_operator.plan.observed import Manifest, Service
from starling_operator.plan.rollout import Ready, RolloutStep, WantedGroups

SCHEDULING_SECONDS = 120.0
"""Seconds after which a group without a node is not waited for any more. Autoscalers bring a node within a few minutes."""


def disruption_budget(service: Service, available: int) -> Manifest:
    """Makes the budget. Pods that do not serve may always be evicted."""
    return child(service, "policy/v1", "PodDisruptionBudget", service.name) | {
        "spec": {
            "minAvailable": available,
            "selector": {"matchLabels": labels.serving_selector(service)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
    }


def min_available(
    groups: Groups, change: RolloutStep, wanted: WantedGroups, ready: Ready, broken: Container[str], now: float
) -> int:
    """Returns the number of pods that evictions have to leave.

    `change` has no group that the API server refuses. `broken`: names of groups that do not come up by themselves.
    """
    kept = groups.without((*change.remove, *groups.canary)).all
    leaving = (pod for pod in groups.leaving if pod.deleted_at is None)
    pods = [*leaving, *(pod for group in groups.all for pod in group.remaining_pods)]
    spare = _evictable(kept, wanted, ready)
    if spare <= 0 and any(group.cordoned for group in kept) and not _is_starting(kept, change, ready, broken, now):
        # No group comes that would be worth a wait, and a node's drain must not wait for ever.
        spare = 1
    return max(0, sum(pod.ready for pod in pods) - spare) if spare > 0 else len(pods)


def _evictable(kept: Sequence[Group], wanted: WantedGroups, ready: Ready) -> int:
    """Groups that may go; in pods, where each pod serves by itself."""
    if all(group.drains_as_one for group in kept):
        return sum(map(ready, kept)) - wanted.kept_by_evictions(wanted.replicas)
    serving = sum(pod.ready for group in kept for pod in group.remaining_pods)
    return serving - wanted.kept_by_evictions(wanted.replicas * wanted.nodes)


def _is_starting(kept: Sequence[Group], change: RolloutStep, ready: Ready, broken: Container[str], now: float) -> bool:
    """True if a group is about to serve."""
    starting = (group for group in kept if not ready(group))
    return bool(change.create) or any(group.name not in broken and not _is_stuck(group, now) for group in starting)


def _is_stuck(group: Group, now: float) -> bool:
    waits = (pod for pod in group.remaining_pods if pod.waiting.startswith("Unschedulable"))
    return (
        group.deadline_exceeded
        or bool(group.pod_creation_error)
        or any(now - pod.created_at >= SCHEDULING_SECONDS for pod in waits)
    )
