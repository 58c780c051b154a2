"""The plan of a service as a tree of lines. To import rich would take much of the time that `starling plan` has."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from starling_crds.layout import GroupLayout
from starling_crds.spec_layout import elastic_sizes
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_operator.plan.observed import Manifest

from starling_cli.planning.planned import PlannedGroup, PlannedService

MAX_NODES, MAX_GROUPS, MAX_SIZES = 16, 16, 16
"""Largest numbers that are drawn one by one; the rest looks the same, and is a count."""


@dataclass
class Branch:
    """A line of a tree, and the branches below it."""

    text: str
    branches: list["Branch"] = field(default_factory=list)

    def add(self, text: str) -> "Branch":
        branch = Branch(text)
        self.branches.append(branch)
        return branch

    def lines(self) -> Iterator[str]:
        yield self.text
        for branch in self.branches:
            is_last = branch is self.branches[-1]
            first, *rest = branch.lines()
            yield f"{'└── ' if is_last else '├── '}{first}"
            yield from (f"{'    ' if is_last else '│   '}{line}" for line in rest)


@dataclass(frozen=True, slots=True)
class Rank:
    """Coordinates of one worker; data parallel is outermost. `expert` counts within its pipeline stage."""

    number: int
    node: int
    data: int
    pipeline: int
    tensor: int
    expert: int

    def __str__(self) -> str:
        return f"rank {self.number}: dp {self.data}, pp {self.pipeline}, tp {self.tensor}, ep {self.expert}"


def ranks_of(layout: GroupLayout) -> tuple[Rank, ...]:
    return tuple(_rank(layout, number, number // layout.per_node) for number in range(layout.ranks))


def _rank(layout: GroupLayout, number: int, node: int) -> Rank:
    rest, tensor = divmod(number, layout.tensor)
    data, pipeline = divmod(rest, layout.pipeline)
    return Rank(number, node, data, pipeline, tensor, data * layout.tensor + tensor)


def draw(planned: PlannedService) -> Branch:
    service, layout = planned.service, planned.layout
    assert service.spec is not None
    root = Branch(f"InferenceService {service.namespace}/{service.name}: {service.spec.model.source}")
    if planned.refused:
        root.add(f"the operator refuses it: {planned.refused}")
    for child in planned.shared:
        root.add(_describe(child))
    count = f"{len(planned.groups)} group{'' if len(planned.groups) == 1 else 's'}"
    groups = root.add(f"{count} of {layout}: {_count(layout.nodes, 'node')}, {_count(layout.ranks, 'rank')} each")
    if service.spec.parallelism.elastic is not None:
        groups.add(_sizes(service.spec))
    for number, group in enumerate(planned.groups[:MAX_GROUPS]):
        _draw_group(groups, group, planned, in_detail=number == 0)
    _add_rest(groups, len(planned.groups) - MAX_GROUPS, "group")
    return root


def _sizes(spec: InferenceServiceSpec) -> str:
    """Returns a line with the sizes that a live group may take."""
    split, per_node = spec.parallelism, spec.accelerators.per_node
    unit, each = ("expert", split.tensor) if split.expert is not None else ("data", 1)
    sizes = [str(data * each) for data in elastic_sizes(split, per_node)]
    shown = ", ".join(sizes[:MAX_SIZES]) + (f", ... {sizes[-1]}" if len(sizes) > MAX_SIZES else "")
    return f"elastic: {unit} may be {shown} without a rolling update"


def _draw_group(parent: Branch, group: PlannedGroup, planned: PlannedService, in_detail: bool) -> None:
    kinds = ", ".join(_describe(child).split(" ")[0] for child in group.children)
    branch = parent.add(f"group {group.name} ({kinds}){'' if in_detail else ', as the first'}")
    if not in_detail:
        return
    nodes: dict[int, list[Rank]] = {}
    for rank in ranks_of(planned.layout):
        nodes.setdefault(rank.node, []).append(rank)
    for node in range(min(len(nodes), MAX_NODES)):
        pod = branch.add(f"pod {group.name}-{node}{', the leader' if node == 0 else ''}")
        for rank in nodes[node]:
            pod.add(str(rank))
    _add_rest(branch, len(nodes) - MAX_NODES, "pod")


def _add_rest(branch: Branch, count: int, what: str) -> None:
    if count > 0:
        branch.add(f"and {_count(count, what)} more")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _describe(child: Manifest) -> str:
    kind, name = child["kind"], child["metadata"]["name"]
    spec = child.get("spec", {})
    if kind == "Service" and spec.get("clusterIP") != "None":
        ports = ", ".join(f"{port['port']} -> {port['targetPort']}" for port in spec["ports"])
        return f"Service {name} ({ports})"
    if kind == "PodDisruptionBudget":
        return f"{kind} {name} (minAvailable {spec.get('minAvailable')})"
    return f"{kind} {name}"
