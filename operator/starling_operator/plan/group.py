"""Groups as observed: a StatefulSet with its pods, its revision and its record in the last status."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from starling_agent.contract.config import LayoutConfig
from starling_crds.v1alpha1.status import GroupStatus

from starling_operator.plan import labels, names
from starling_operator.plan.elastic.elastic_state import ElasticState
from starling_operator.plan.observed import Manifest, Observed, Pod
from starling_operator.plan.progress import last_progress
from starling_operator.plan.revision import Revision


@dataclass(frozen=True, kw_only=True)
class Group:
    """One group that exists.

    nodes           pods that its StatefulSet asks for
    target          true if it is of the revision whose groups the service is to have: the spec's, or the one that a canary leaves
    is_canary       it is of a revision that is tried on a part of the requests, or was
    pods            by number, also those that are being deleted
    pod_creation_error   Kubernetes' message why it does not create some pods; "" if it creates them, or gives no reason
    previous        its record in the last status; None for a new group
    was_ready       the last status was of this generation and called it ready. Counts until its agents have answered this operator
    progressed_at   time of its last progress, in seconds since the epoch
    deadline_exceeded   that time is longer ago than the progress deadline of the spec
    is_gang         its nodes hold ranks that step together: one that fails takes the others along
    elastic         state of its size, where that changes while it serves; None for all other groups
    cordoned        a pod of it is on a cordoned cluster node, and so about to be evicted
    is_to_sleep     its agents are told to sleep
    """

    name: str
    revision: str
    uid: str
    nodes: int
    target: bool
    is_canary: bool = False
    pods: tuple[Pod, ...] = ()
    pod_creation_error: str = ""
    previous: GroupStatus | None = None
    was_ready: bool = False
    progressed_at: float = 0.0
    deadline_exceeded: bool = False
    is_gang: bool = True
    elastic: ElasticState | None = None
    cordoned: bool = False
    is_to_sleep: bool = False

    @property
    def index(self) -> int:
        return names.group_index(self.name)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of pods that its StatefulSet has yet to create. It cannot while a pod of that name drains."""
        return missing_pods(self.name, self.nodes, self.pods)

    @cached_property
    def remaining_pods(self) -> tuple[Pod, ...]:
        """Pods that stay: neither being deleted, nor on a lost node."""
        return tuple(pod for pod in self.pods if pod.deleted_at is None and not pod.lost)

    @property
    def gang_size(self) -> int:
        """Number of its first pods that hold ranks which step together. Pods that join for a larger size, or have left, do not."""
        known = self.elastic.gang if self.elastic is not None else None
        return self.nodes if known is None else min(known, self.nodes)

    @property
    def needed_nodes(self) -> int:
        """Number of its first pods that have to serve for the group to serve."""
        known = self.elastic.needed if self.elastic is not None else None
        return self.nodes if known is None else known

    @property
    def gang_pods(self) -> tuple[Pod, ...]:
        """Remaining pods of the gang."""
        return self._first(self.gang_size)

    @property
    def needed_pods(self) -> tuple[Pod, ...]:
        """Remaining pods that have to serve for the group to serve."""
        return self._first(self.needed_nodes)

    def _first(self, count: int) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.remaining_pods if pod.number < count)

    @property
    def drains_as_one(self) -> bool:
        """True if a pod that drains takes the whole group along."""
        return self.is_gang or self.nodes == 1

    @property
    def draining(self) -> bool:
        """True if a pod is terminated on purpose, so that all of the group drains. A lost node is a failure instead."""
        drains = any(pod.drains for pod in self.pods if pod.number < self.gang_size)
        return self.drains_as_one and drains and not any(pod.lost for pod in self.pods)

    @property
    def open_streams(self) -> int:
        """Sum over its agents' last reports."""
        return sum(pod.report.open_streams for pod in self.remaining_pods if pod.report is not None)

    @property
    def created_at(self) -> float:
        """Creation time of its oldest pod, in seconds since the epoch."""
        return min((pod.created_at for pod in self.remaining_pods), default=math.inf)

    @property
    def is_asleep(self) -> bool:
        """True if all its engine cores have given memory back, which its leader knows."""
        return any(pod.number == 0 and pod.report is not None and pod.report.asleep for pod in self.remaining_pods)

    @property
    def scheduled(self) -> bool:
        """True if all pods that it needs have a node: it serves whatever other waiting groups hold, even if it cannot grow."""
        return len(self.needed_pods) == self.needed_nodes and all(pod.scheduled for pod in self.needed_pods)

    @property
    def available(self) -> bool:
        """True if all pods that it needs are Ready by their own probes."""
        return len(self.needed_pods) == self.needed_nodes and all(pod.ready for pod in self.needed_pods)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All groups, and the rest of those that were removed.

    current    groups of the target revision, by number
    old        groups of other revisions, by revision and number
    canary     groups of a revision that is tried, by number
    leaving    pods whose StatefulSet is gone: they drain
    orphans    headless Services of which group and pods are gone. Pods that drain still find each other by theirs
    """

    current: tuple[Group, ...]
    old: tuple[Group, ...]
    canary: tuple[Group, ...] = ()
    leaving: tuple[Pod, ...]
    orphans: tuple[Manifest, ...]

    @property
    def all(self) -> tuple[Group, ...]:
        return self.old + self.current + self.canary

    @property
    def pods(self) -> tuple[Pod, ...]:
        """All pods, also those that drain after their group was removed."""
        return tuple(pod for group in self.all for pod in group.pods) + self.leaving

    def without(self, gone: Iterable[Group]) -> "Groups":
        names_gone = {group.name for group in gone}
        current, old, canary = (
            tuple(one for one in groups if one.name not in names_gone) for groups in (self.current, self.old, self.canary)
        )
        return replace(self, current=current, old=old, canary=canary)


def read_groups(observed: Observed, target: str, revisions: Iterable[Revision], canary: str = "") -> Groups:
    """Returns the groups of a service. `revisions`: all known.

    `target`: id of the wanted revision, "" if the spec is refused; `canary`: id of the one that is tried.
    """
    sets = [
        live
        for (kind, _), live in sorted(observed.children.items())
        if kind == "StatefulSet" and labels.GROUP in _labels(live) and not live["metadata"].get("deletionTimestamp")
    ]
    by_name = _pods_by_group(observed.pods)
    elastic = {known.id: known.layout for known in revisions if known.layout.elastic is not None}
    groups = [_group(observed, live, target, canary, by_name.get(live["metadata"]["name"], ()), elastic) for live in sets]
    groups.sort(key=lambda group: (group.revision, group.index))
    known = {group.name for group in groups}
    return Groups(
        current=tuple(group for group in groups if group.target),
        old=tuple(group for group in groups if not group.target and not group.is_canary),
        canary=tuple(group for group in groups if group.is_canary),
        leaving=tuple(pod for pod in observed.pods if pod.group not in known),
        orphans=_orphans(observed, known | by_name.keys()),
    )


def missing_pods(group: str, nodes: int, pods: Iterable[Pod]) -> tuple[str, ...]:
    """Returns the names of a group's pods that no pod has."""
    present = {pod.name for pod in pods}
    return tuple(name for name in (f"{group}-{number}" for number in range(nodes)) if name not in present)


def nodes_form_gang(observed: Observed, revision: str) -> bool:
    """False if each node holds whole data parallel ranks that exchange nothing with the others, which serve on without it.

    A revision that cannot be read counts as a gang.
    """
    live = observed.children.get(("ConfigMap", names.revision_object(observed.service.name, revision)))
    try:
        config = json.loads((live or {})["data"]["agent.json"])
        layout = LayoutConfig.model_validate(config["layout"])
    except (KeyError, TypeError, ValueError):
        return True
    several = layout.data > 1 or layout.elastic is not None
    experts = several and bool(config.get("engine", {}).get("enable_expert_parallel"))
    return layout.tensor * layout.pipeline > layout.per_node or experts


def _group(
    observed: Observed, live: Manifest, target: str, canary: str, pods: Sequence[Pod], elastic: Mapping[str, LayoutConfig]
) -> Group:
    status = observed.service.status
    name = live["metadata"]["name"]
    previous = next((known for known in status.groups if known.name == name), None)
    revision = _labels(live).get(labels.REVISION, "")
    same = status.observed_generation == observed.service.generation
    progressed_at = last_progress(previous, pods, observed.now)
    spec, state = observed.service.spec, None
    limit = spec.rollout.progress_deadline_seconds if spec is not None else math.inf
    if revision in elastic:
        leader = next((pod.report for pod in pods if pod.number == 0 and pod.deleted_at is None and not pod.lost), None)
        state = ElasticState(layout=elastic[revision], leader=leader, stored=previous.operation if previous is not None else None)
    return Group(
        name=name,
        revision=revision,
        uid=live["metadata"].get("uid", ""),
        nodes=int(live["spec"].get("replicas", 1)),
        target=revision == target,
        is_canary=revision == canary != target,
        pods=tuple(sorted(pods, key=lambda pod: (pod.number, pod.created_at))),
        pod_creation_error=observed.pod_creation_errors.get(name, ""),
        previous=previous,
        was_ready=same and previous is not None and previous.ready,
        progressed_at=progressed_at,
        deadline_exceeded=observed.now - progressed_at > limit
        and not any(pod.report is not None and pod.report.asleep for pod in pods),
        is_gang=nodes_form_gang(observed, revision),
        elastic=state,
        cordoned=any(pod.cluster_node in (observed.cordoned or ()) for pod in pods if pod.deleted_at is None),
        is_to_sleep=status.scaling is not None and status.scaling.sleep_level > 0,
    )


def _pods_by_group(pods: Sequence[Pod]) -> Mapping[str, list[Pod]]:
    found: dict[str, list[Pod]] = {}
    for pod in pods:
        found.setdefault(pod.group, []).append(pod)
    return found


def _orphans(observed: Observed, known: set[str]) -> tuple[Manifest, ...]:
    return tuple(
        live
        for (kind, name), live in sorted(observed.children.items())
        if kind == "Service" and labels.GROUP in _labels(live) and name not in known
        if not live["metadata"].get("deletionTimestamp")
    )


def _labels(live: Manifest) -> dict[str, str]:
    return live["metadata"].get("labels") or {}
