"""How many pods an eviction may take now: the PodDisruptionBudget, which the operator opens and closes.

Kubernetes counts pods, but what serves is a group: the first pod that is evicted takes its whole group along. So as many pods may
be evicted as groups may go; the other pods of those groups are on their way out by then, and nobody is refused them. The budget is
a number of pods that have to stay: for one that may go Kubernetes asks the owners of all pods, and of those that drain the owner
is gone.
"""

from collections.abc import Container, Sequence

from starling_operator.plan import labels
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.manifest import child
from starling_operator.plan.observed import Manifest, Service
from starling_operator.plan.rollout import Ready, RolloutStep, WantedGroups

PLACING_SECONDS = 120.0
"""A group that has had no node for so long is no longer waited for. Autoscalers bring a node within a few minutes."""


def disruption_budget(service: Service, available: int) -> Manifest:
    """Pods that do not serve may always be evicted."""
    return child(service, "policy/v1", "PodDisruptionBudget", service.name) | {
        "spec": {
            "minAvailable": available,
            "selector": {"matchLabels": labels.serving_selector(service)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
    }


def min_available(
    groups: Groups, change: RolloutStep, wanted: WantedGroups, ready: Ready, failures: Container[str], now: float
) -> int:
    """Pods that evictions have to leave.

    `change` has no group that the API server refuses. `failures`: names of groups that do not come up by themselves.
    """
    kept = groups.without(change.remove).all
    leaving = (pod for pod in groups.leaving if pod.deleted_at is None)
    live = [*leaving, *(pod for group in groups.all for pod in group.live)]
    spare = _spare(kept, wanted, ready)
    if spare <= 0 and any(group.cordoned for group in kept) and not _coming(kept, change, ready, failures, now):
        # Nothing better is to be waited for, and a node that has to be emptied must not wait for ever.
        spare = 1
    return max(0, sum(pod.ready for pod in live) - spare) if spare > 0 else len(live)


def _spare(kept: Sequence[Group], wanted: WantedGroups, ready: Ready) -> int:
    """Groups that may go; pods, where each serves by itself."""
    if all(group.is_one for group in kept):
        return sum(map(ready, kept)) - wanted.left_by_evictions(wanted.replicas)
    serving = sum(pod.ready for group in kept for pod in group.live)
    return serving - wanted.left_by_evictions(wanted.replicas * wanted.nodes)


def _coming(kept: Sequence[Group], change: RolloutStep, ready: Ready, failures: Container[str], now: float) -> bool:
    """Whether a group is about to serve."""
    starting = (group for group in kept if not ready(group))
    return bool(change.create) or any(group.name not in failures and not _is_stuck(group, now) for group in starting)


def _is_stuck(group: Group, now: float) -> bool:
    waits = (pod for pod in group.live if pod.waiting.startswith("Unschedulable"))
    return group.overdue or bool(group.refused) or any(now - pod.created_at >= PLACING_SECONDS for pod in waits)
