"""Everything that a manifest would become in an empty cluster, decided by the operator's own plan."""

from collections.abc import Iterator
from dataclasses import dataclass

from starling_crds.layout import GroupLayout
from starling_crds.spec_layout import group_layout
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_operator.plan import labels
from starling_operator.plan.decision import Decision
from starling_operator.plan.observed import Manifest, Observed, Pod, Service, Settings
from starling_operator.plan.plan import plan
from starling_operator.plan.revision import spec_hash

TOKEN = "made of the operator's key"
Children = dict[tuple[str, str], Manifest]


@dataclass(frozen=True)
class PlannedGroup:
    """One copy of the model: its own two children."""

    name: str
    children: tuple[Manifest, ...]


@dataclass(frozen=True)
class PlannedService:
    """`refused` says why the operator would not act on it although the API server takes it; None: it would."""

    service: Service
    layout: GroupLayout
    spec_hash: str
    shared: tuple[Manifest, ...]
    groups: tuple[PlannedGroup, ...]
    refused: str | None

    @property
    def children(self) -> tuple[Manifest, ...]:
        return (*self.shared, *(child for group in self.groups for child in group.children))


class CannotPlan(Exception):
    """No pods can be made of this spec; the message names the field."""


def plan_of(service: Service, agent_image: str) -> PlannedService:
    """Returns the plan of a service, which must have a spec. Raises CannotPlan."""
    spec = service.spec
    assert spec is not None
    settings = Settings(agent_image=agent_image)
    reason, message = _refusal(plan(_observed(service, settings, {})))
    if reason == "InvalidSpec":
        raise CannotPlan(message)
    children = tuple(_all_children(service, settings).values())
    groups = [child["metadata"]["name"] for child in children if child["kind"] == "StatefulSet"]
    return PlannedService(
        service=service,
        layout=group_layout(spec.parallelism, spec.accelerators.per_node),
        spec_hash=spec_hash(spec),
        shared=tuple(child for child in children if _group_of(child) is None),
        groups=tuple(PlannedGroup(name, tuple(child for child in children if _group_of(child) == name)) for name in groups),
        refused=message if reason else None,
    )


def _refusal(decision: Decision) -> tuple[str, str]:
    """Returns (reason, message); both are empty where the operator would act."""
    stalled = next((entry for entry in decision.status.conditions if entry.type == "Stalled"), None)
    return (stalled.reason, stalled.message) if stalled is not None and stalled.status == "True" else ("", "")


def _all_children(service: Service, settings: Settings) -> Children:
    """Returns the children once every pod has found a node: groups of several nodes are created one after the other."""
    children: Children = {}
    while True:
        decision = plan(_observed(service, settings, children), _everything_is_supported)
        before = len(children)
        for manifest in (*decision.create, *decision.apply):
            children.setdefault((manifest["kind"], manifest["metadata"]["name"]), manifest)
        if len(children) == before:
            return children


def _everything_is_supported(spec: InferenceServiceSpec) -> Iterator[str]:
    """Refuses nothing: a layout is shown even if this release cannot run it yet, which `refused` says."""
    del spec
    return iter(())


def _observed(service: Service, settings: Settings, children: Children) -> Observed:
    groups = [child for (kind, _), child in children.items() if kind == "StatefulSet"]
    pods = tuple(_scheduled_pod(group, number) for group in groups for number in range(group["spec"]["replicas"]))
    live = {key: {**child, "metadata": {**child["metadata"], "uid": "/".join(key)}} for key, child in children.items()}
    return Observed(service=service, children=live, pods=pods, settings=settings, now=0.0, token=TOKEN)


def _scheduled_pod(group: Manifest, number: int) -> Pod:
    name, own = group["metadata"]["name"], group["metadata"]["labels"]
    return Pod(
        name=f"{name}-{number}",
        uid=f"{name}-{number}",
        group=name,
        revision=own[labels.REVISION],
        number=number,
        phase="Running",
        scheduled=True,
    )


def _group_of(child: Manifest) -> str | None:
    found: str | None = child["metadata"]["labels"].get(labels.GROUP)
    return found
