"""Objects that a decision creates, applies and deletes."""

from collections.abc import Sequence
from dataclasses import dataclass

from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.admin_token import token_secret
from starling_operator.plan.children import group_children, revision_children, service_children
from starling_operator.plan.decision import Delete
from starling_operator.plan.disruption import disruption_budget
from starling_operator.plan.elastic.parallelism_scale import scale_child, scale_deletion
from starling_operator.plan.gateway import gateway_deletions
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.pinned_commit import new_pinned_commit
from starling_operator.plan.recovery import (
    lost_pod_deletions,
    restart_deletions,
    unlabelled_pod_deletions,
    unobserved_pod_deletions,
)
from starling_operator.plan.revision import Revision, Revisions, outdated
from starling_operator.plan.router import router_deletions, router_secret
from starling_operator.plan.status_inputs import StatusInputs


def created_objects(observed: Observed, inputs: StatusInputs, revisions: Revisions) -> tuple[Manifest, ...]:
    """Missing objects of the target revision and of those in use, and the token's Secret while a pod still has to mount it."""
    wanted = [token_secret(observed.service, observed.token)] if _token_needed(inputs) else []
    wanted += router_secret(observed)
    for identifier in sorted({inputs.target_revision, inputs.spec_revision} | {group.revision for group in inputs.kept}):
        revision = revisions.find(identifier)
        if revision is not None:
            wanted += (*revision_children(observed.service, revision), *new_pinned_commit(observed, revision))
    return tuple(made for made in wanted if (made["kind"], made["metadata"]["name"]) not in observed.children)


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group to create: `nodes` pods of a revision."""

    name: str
    revision: Revision
    nodes: int


def applied_objects(
    observed: Observed, spec: InferenceServiceSpec, inputs: StatusInputs, revisions: Revisions, new_groups: Sequence[NewGroup]
) -> tuple[Manifest, ...]:
    """The service's children, then each group's. A group whose revision cannot be read is left as it is."""
    service = observed.service
    manifests = [*service_children(observed, spec), disruption_budget(service, inputs.min_available)]
    if inputs.desired is not None:
        manifests.append(scale_child(observed, inputs.desired))
    for group in inputs.kept:
        revision = revisions.find(group.revision)
        if revision is not None:
            manifests += group_children(service, revision, group.name, inputs.nodes_of(group), observed.token)
    for new in new_groups:
        manifests += group_children(service, new.revision, new.name, new.nodes, observed.token)
    return tuple(manifests)


def deleted_objects(observed: Observed, inputs: StatusInputs, revisions: Revisions) -> tuple[Delete, ...]:
    """Groups, pods, and revisions that no pod uses any more. Each deletion names the UID that was observed, as precondition."""
    groups = inputs.groups
    in_use = {group.revision for group in groups.all} | {pod.revision for pod in groups.leaving} | {inputs.target_revision}
    return (
        *_group_deletions(inputs.rollout.remove, groups),
        *deleted_pods(observed, inputs),
        *scale_deletion(observed, inputs.desired),
        *gateway_deletions(observed),
        *router_deletions(observed),
        *_revision_deletions(observed, outdated(revisions, frozenset(in_use))),
    )


def deleted_pods(observed: Observed, inputs: StatusInputs) -> tuple[Delete, ...]:
    """Pods that their StatefulSet is to recreate, or that cannot terminate by themselves. This works without a valid spec."""
    return (
        *(deletion for decision in inputs.recoveries.values() for deletion in restart_deletions(decision)),
        *lost_pod_deletions(observed.pods),
        *unlabelled_pod_deletions(observed.pods),
        *unobserved_pod_deletions(inputs.groups.all, inputs.recoveries),
    )


def _token_needed(inputs: StatusInputs) -> bool:
    """True while a pod still has to mount the token. Running pods do not need its Secret, and the operator never reads it."""
    pods = (pod for group in inputs.kept for pod in group.remaining_pods)
    return bool(inputs.rollout.create or inputs.rollout.create_canary) or any(pod.phase == "Pending" for pod in pods)


def _group_deletions(removed: tuple[Group, ...], groups: Groups) -> tuple[Delete, ...]:
    """StatefulSets of removed groups, whose pods then get SIGTERM and drain; and Services of groups whose last pod has ended."""
    sets = (Delete("StatefulSet", group.name, group.uid, why=_why_removed(group)) for group in removed)
    return (*sets, *(_deletion(service, "its group is gone") for service in groups.orphans))


def _revision_deletions(observed: Observed, unused: tuple[Revision, ...]) -> tuple[Delete, ...]:
    """The ControllerRevision last: its ConfigMaps are found through it."""
    found: list[Delete] = []
    for revision in unused:
        name = names.revision_object(observed.service.name, revision.id)
        for config in (name, names.pin(observed.service.name, revision.id)):
            live = observed.children.get(("ConfigMap", config))
            if live is not None:
                found.append(_deletion(live, "its revision is outdated and unused"))
        found.append(Delete("ControllerRevision", name, revision.uid, why="outdated and unused"))
    return tuple(found)


def _why_removed(group: Group) -> str:
    return "a pod of the group is being terminated" if group.draining else "the group is no longer wanted"


def _deletion(live: Manifest, why: str) -> Delete:
    return Delete(live["kind"], live["metadata"]["name"], live["metadata"].get("uid", ""), why=why)
