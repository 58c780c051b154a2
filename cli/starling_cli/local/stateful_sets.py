"""Pods that must start or stop, as a StatefulSet controller would decide. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starling_operator.plan import labels
from starling_operator.plan.observed import Manifest

from starling_cli.local.pod import LocalPod


@dataclass(frozen=True)
class MissingPod:
    """A pod that a StatefulSet wants and that is not there."""

    name: str
    group: str
    group_uid: str
    revision: str
    number: int


def missing_pods(groups: Mapping[str, Manifest], pods: Iterable[LocalPod]) -> list[MissingPod]:
    """Returns the pods to start. One that is still ending keeps its name, for which its successor waits."""
    taken = {pod.name for pod in pods}
    return [pod for group in groups.values() for pod in _wanted(group) if pod.name not in taken]


def surplus_pods(groups: Mapping[str, Manifest], pods: Iterable[LocalPod]) -> list[LocalPod]:
    """Returns the pods whose StatefulSet is gone, was replaced, or wants fewer."""
    wanted = {(pod.name, pod.group_uid) for group in groups.values() for pod in _wanted(group)}
    return [pod for pod in pods if (pod.name, pod.group_uid) not in wanted]


def _wanted(group: Manifest) -> list[MissingPod]:
    meta = group["metadata"]
    return [
        MissingPod(f"{meta['name']}-{number}", meta["name"], meta["uid"], meta["labels"][labels.REVISION], number)
        for number in range(int(group["spec"]["replicas"]))
    ]
