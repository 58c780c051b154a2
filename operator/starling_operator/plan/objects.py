"""The three parts of a decision that change the cluster: what is made once, what is applied, what goes."""

from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan.children import route_deletion, service_children
from starling_operator.plan.decision import Delete
from starling_operator.plan.disruption import disruption_budget
from starling_operator.plan.elastic.child import scale_child, scale_deletion
from starling_operator.plan.group_children import group_children
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.pin import new_pin
from starling_operator.plan.recovery import deletions, mended, recalled, released
from starling_operator.plan.removal import group_deletions, revision_deletions
from starling_operator.plan.revision import Revisions, outdated
from starling_operator.plan.revision_children import revision_children
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.token import token_secret


def made_once(observed: Observed, situation: StatusInputs, revisions: Revisions) -> tuple[Manifest, ...]:
    """The revisions that are wanted or in use, as far as they are not there yet; the token, while pods are to mount it."""
    wanted = [token_secret(observed.service, observed.token)] if _pods_start(situation) else []
    for identifier in sorted({situation.target} | {group.revision for group in situation.kept}):
        revision = revisions.find(identifier)
        if revision is not None:
            wanted += (*revision_children(observed.service, revision), *new_pin(observed, revision))
    return tuple(made for made in wanted if (made["kind"], made["metadata"]["name"]) not in observed.children)


def applied(
    observed: Observed, spec: InferenceServiceSpec, situation: StatusInputs, revisions: Revisions, created: tuple[str, ...]
) -> tuple[Manifest, ...]:
    """The service's own children, then each group's. A group whose revision cannot be read is left as it is."""
    service, nodes = observed.service, situation.nodes
    manifests = [*service_children(service, spec, observed.settings), disruption_budget(service, situation.min_available)]
    if situation.desired is not None:
        manifests.append(scale_child(observed, situation.desired))
    for group in situation.kept:
        revision = revisions.find(group.revision)
        if revision is not None:
            manifests += group_children(service, revision, group.name, situation.nodes_of(group), observed.token)
    for name in created:
        manifests += group_children(service, revisions.target, name, nodes, observed.token)
    return tuple(manifests)


def _pods_start(situation: StatusInputs) -> bool:
    """Whether the token's Secret is there nobody tells: it is never read, and pods that run do not miss it."""
    pods = (pod for group in situation.kept for pod in group.live)
    return bool(situation.change.create) or any(pod.phase == "Pending" for pod in pods)


def deleted_pods(observed: Observed, situation: StatusInputs) -> tuple[Delete, ...]:
    """That are made anew or let go, whatever the spec says."""
    return (
        *(deletion for healing in situation.healing.values() for deletion in deletions(healing)),
        *released(observed.pods),
        *mended(observed.pods),
        *recalled(situation.groups.all, situation.healing),
    )


def deleted(observed: Observed, situation: StatusInputs, revisions: Revisions) -> tuple[Delete, ...]:
    """Groups, pods that are made anew or let go, revisions that nothing is made of any more."""
    groups = situation.groups
    in_use = frozenset({group.revision for group in groups.all} | {pod.revision for pod in groups.leaving})
    return (
        *group_deletions(situation.change.remove, groups),
        *deleted_pods(observed, situation),
        *scale_deletion(observed, situation.desired),
        *route_deletion(observed),
        *revision_deletions(observed, outdated(revisions, in_use)),
    )
