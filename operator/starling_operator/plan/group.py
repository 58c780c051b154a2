"""Groups as they are: a StatefulSet with its pods, its revision and what the last status knew of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from starling_agent.contract.config import LayoutConfig
from starling_crds.v1alpha1.status import GroupStatus

from starling_operator.plan import labels, names
from starling_operator.plan.elastic.elastic_state import ElasticState
from starling_operator.plan.observed import Manifest, Observed, Pod
from starling_operator.plan.progress import progressed
from starling_operator.plan.revision import Revision
from starling_operator.plan.tied import nodes_are_tied


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group that exists.

    nodes      pods that its StatefulSet asks for
    target     it is of the revision that the spec asks for
    pods       by number, also those that are going
    refused    Kubernetes' words about pods that it does not make; "" if it makes them, or says nothing
    previous   what the last status said of it; None for a new one
    believed   the last status was of this generation and called it ready: enough until its agents have answered this operator
    progressed_at   when it last came further, in seconds since the epoch; overdue: that is longer ago than the spec allows
    tied       its nodes hold ranks that step together: one that fails takes the others along
    sizing     of a group whose size changes while it serves; None for all others
    cordoned   a pod of it is on a node that takes no new ones: it is about to be taken away
    """

    name: str
    revision: str
    uid: str
    nodes: int
    target: bool
    pods: tuple[Pod, ...] = ()
    refused: str = ""
    previous: GroupStatus | None = None
    believed: bool = False
    progressed_at: float = 0.0
    overdue: bool = False
    tied: bool = True
    sizing: ElasticState | None = None
    cordoned: bool = False

    @property
    def index(self) -> int:
        return names.group_index(self.name)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the pods that its StatefulSet has still to make; it cannot while one of that name drains."""
        return missing_pods(self.name, self.nodes, self.pods)

    @property
    def live(self) -> tuple[Pod, ...]:
        """The pods that stay."""
        return tuple(pod for pod in self.pods if pod.deleted_at is None and not pod.lost)

    @property
    def gang(self) -> int:
        """Its first so many pods hold the ranks that step together: not those that join for a larger size, or have left."""
        known = self.sizing.gang if self.sizing is not None else None
        return self.nodes if known is None else min(known, self.nodes)

    @property
    def needed(self) -> int:
        """Its first so many pods have to serve for the group to serve."""
        known = self.sizing.needed if self.sizing is not None else None
        return self.nodes if known is None else known

    @property
    def members(self) -> tuple[Pod, ...]:
        """Live pods of the gang."""
        return self._first(self.gang)

    @property
    def serving(self) -> tuple[Pod, ...]:
        """Live pods of those that are needed."""
        return self._first(self.needed)

    def _first(self, count: int) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.live if pod.number < count)

    @property
    def is_one(self) -> bool:
        """A pod that goes takes the whole group along."""
        return self.tied or self.nodes == 1

    @property
    def going(self) -> bool:
        """One of its pods is taken away on purpose: the others drain with it. Not where a node is lost: that is a failure."""
        drains = any(pod.drains for pod in self.pods if pod.number < self.gang)
        return self.is_one and drains and not any(pod.lost for pod in self.pods)

    @property
    def open_streams(self) -> int:
        """As its agents reported them last."""
        return sum(pod.report.open_streams for pod in self.live if pod.report is not None)

    @property
    def born(self) -> float:
        """When its oldest pod was made."""
        return min((pod.created_at for pod in self.live), default=math.inf)

    @property
    def placed(self) -> bool:
        """All its pods have a node: it can no longer wait for one that another half-placed group holds."""
        return len(self.live) == self.nodes and all(pod.scheduled for pod in self.live)

    @property
    def available(self) -> bool:
        """Its pods' own probes say that they serve."""
        return len(self.serving) == self.needed and all(pod.ready for pod in self.serving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """All groups, and what is left of those that went.

    current, old   of the target revision, and of others; by revision and number
    leaving        pods whose StatefulSet is gone: they drain
    orphans        live Services of groups of which nothing else is left; while pods drain, they find each other by it
    """

    current: tuple[Group, ...]
    old: tuple[Group, ...]
    leaving: tuple[Pod, ...]
    orphans: tuple[Manifest, ...]

    @property
    def all(self) -> tuple[Group, ...]:
        return self.old + self.current

    def without(self, gone: Iterable[Group]) -> "Groups":
        names_gone = {group.name for group in gone}
        current, old = (tuple(one for one in groups if one.name not in names_gone) for groups in (self.current, self.old))
        return replace(self, current=current, old=old)


def read_groups(observed: Observed, target: str, revisions: Iterable[Revision]) -> Groups:
    """From what is seen. `target` is the id of the wanted revision; "" while nobody can tell. `revisions`: all that are known."""
    sets = [
        live
        for (kind, _), live in sorted(observed.children.items())
        if kind == "StatefulSet" and labels.GROUP in _labels(live) and not live["metadata"].get("deletionTimestamp")
    ]
    by_name = _pods_by_group(observed.pods)
    elastic = {known.id: known.layout for known in revisions if known.layout.elastic is not None}
    groups = [_group(observed, live, target, by_name.get(live["metadata"]["name"], ()), elastic) for live in sets]
    groups.sort(key=lambda group: (group.revision, group.index))
    known = {group.name for group in groups}
    return Groups(
        current=tuple(group for group in groups if group.target),
        old=tuple(group for group in groups if not group.target),
        leaving=tuple(pod for pod in observed.pods if pod.group not in known),
        orphans=_orphans(observed, known | by_name.keys()),
    )


def missing_pods(group: str, nodes: int, pods: Iterable[Pod]) -> tuple[str, ...]:
    """Of all names that the group's pods have, those that no pod holds."""
    held = {pod.name for pod in pods}
    return tuple(name for name in (f"{group}-{number}" for number in range(nodes)) if name not in held)


def _group(observed: Observed, live: Manifest, target: str, pods: Sequence[Pod], elastic: Mapping[str, LayoutConfig]) -> Group:
    status = observed.service.status
    name = live["metadata"]["name"]
    previous = next((known for known in status.groups if known.name == name), None)
    revision = _labels(live).get(labels.REVISION, "")
    same = status.observed_generation == observed.service.generation
    progressed_at = progressed(previous, pods, observed.now)
    spec, sizing = observed.service.spec, None
    limit = spec.rollout.progress_deadline_seconds if spec is not None else math.inf
    if revision in elastic:
        leader = next((pod.report for pod in pods if pod.number == 0 and pod.deleted_at is None and not pod.lost), None)
        sizing = ElasticState(layout=elastic[revision], leader=leader, stored=previous.operation if previous is not None else None)
    return Group(
        name=name,
        revision=revision,
        uid=live["metadata"].get("uid", ""),
        nodes=int(live["spec"].get("replicas", 1)),
        target=revision == target,
        pods=tuple(sorted(pods, key=lambda pod: (pod.number, pod.created_at))),
        refused=observed.refused_pods.get(name, ""),
        previous=previous,
        believed=same and previous is not None and previous.ready,
        progressed_at=progressed_at,
        overdue=observed.now - progressed_at > limit and not any(pod.report is not None and pod.report.asleep for pod in pods),
        tied=nodes_are_tied(observed, revision),
        sizing=sizing,
        cordoned=any(pod.host in (observed.cordoned or ()) for pod in pods if pod.deleted_at is None),
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
