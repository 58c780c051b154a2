"""Keeps a status small, whatever the size of its service: an object that etcd refuses would never be written again."""

from collections.abc import Sequence

from starling_crds.v1alpha1.status import GroupStatus

DETAILED_PODS = 128
"""So many pods are shown one by one; those of groups that do not serve come first."""
MOST_ENDPOINTS = 256
_LONGEST_MESSAGE = 1000


def summarised(groups: Sequence[GroupStatus]) -> list[GroupStatus]:
    """In the same order. What is beyond the limit keeps its state, without its pods and its message."""
    left, detailed = DETAILED_PODS, set()
    for group in sorted(groups, key=lambda group: group.ready):
        left -= max(1, len(group.nodes))
        if left >= 0:
            detailed.add(group.name)
    return [_short(group) if group.name in detailed else _without_pods(group) for group in groups]


def _short(group: GroupStatus) -> GroupStatus:
    return group.model_copy(update={"message": group.message[:_LONGEST_MESSAGE]})


def _without_pods(group: GroupStatus) -> GroupStatus:
    return group.model_copy(update={"nodes": [], "message": ""})
