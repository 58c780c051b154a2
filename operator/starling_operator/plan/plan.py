"""The decision: from everything that is seen to everything that is to be done. Same input, same output; nothing is remembered."""

from starling_crds.layout import group_layout
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.children import admin_secret, service_children
from starling_operator.plan.conditions import conditions
from starling_operator.plan.decision import Decision, Delete
from starling_operator.plan.events import events
from starling_operator.plan.failure import broken
from starling_operator.plan.group import Groups, read_groups
from starling_operator.plan.group_children import group_children
from starling_operator.plan.observed import Manifest, Observed
from starling_operator.plan.proof import Asked, unproven, waits_for
from starling_operator.plan.recovery import Healing, deletions, heal, released
from starling_operator.plan.refusals import Refusal, Unsupported, not_in_this_release, refusal
from starling_operator.plan.removal import group_deletions, revision_deletions
from starling_operator.plan.revision import (
    Revision,
    config_manifest,
    outdated,
    revision_manifest,
    stored_revisions,
    target_revision,
)
from starling_operator.plan.rollout import Change, Wanted, change_groups
from starling_operator.plan.situation import Situation
from starling_operator.plan.status import make_status
from starling_operator.plan.verdict import verdict
from starling_operator.plan.waking import wake_after


def plan(observed: Observed, unsupported: Unsupported = not_in_this_release) -> Decision:
    """What is to be done about one service."""
    refused = refusal(observed, unsupported)
    if refused is not None:
        return _refused(observed, refused)
    assert observed.service.spec is not None
    return _carried_out(observed, observed.service.spec)


def _carried_out(observed: Observed, spec: InferenceServiceSpec) -> Decision:
    service, settings = observed.service, observed.settings
    stored = stored_revisions(observed)
    target = target_revision(service, spec, settings, stored)
    groups = read_groups(observed, target.id)
    asked = Asked(target.config_hash, group_layout(spec.parallelism, spec.accelerators.per_node), spec.parallelism.expert)
    unready = {group.name: unproven(group, asked) for group in groups.all}
    failures = {group.name: cause for group in groups.all if (cause := broken(group))}
    change = _change(spec, groups, asked, target, service.name, unready, failures)
    situation = Situation(
        service=service,
        settings=settings,
        now=observed.now,
        groups=groups,
        target=target.id,
        asked=asked,
        change=change,
        unready=unready,
        failures=failures,
        healing=_healing(spec, groups, change, observed.now),
    )
    return _decision(observed, spec, situation, target, stored)


def _refused(observed: Observed, refused: Refusal) -> Decision:
    """Nothing is touched: only the status tells."""
    groups = read_groups(observed, "")
    situation = Situation(
        service=observed.service,
        settings=observed.settings,
        now=observed.now,
        groups=groups,
        target="",
        refused=refused,
        unready={group.name: waits_for(group) for group in groups.all},
    )
    status = make_status(situation, conditions(situation, verdict(situation)))
    return Decision(status=status, events=events(situation, (), status))


def _change(
    spec: InferenceServiceSpec,
    groups: Groups,
    asked: Asked,
    target: Revision,
    service: str,
    unready: dict[str, str],
    failures: dict[str, str],
) -> Change:
    wanted = Wanted(
        replicas=0 if spec.suspend else spec.replicas,
        nodes=asked.layout.nodes,
        rollout=spec.rollout,
        broken=any(group.name in failures for group in groups.current),
    )
    return change_groups(
        groups, wanted, lambda group: not unready[group.name], lambda index: names.group(service, target.id, index)
    )


def _healing(spec: InferenceServiceSpec, groups: Groups, change: Change, now: float) -> dict[str, Healing]:
    """A group that goes anyway is left to drain."""
    kept = [group for group in groups.all if group not in change.remove]
    found = {group.name: heal(group, spec.recovery, now) for group in kept}
    return {name: healing for name, healing in found.items() if healing is not None}


def _decision(
    observed: Observed, spec: InferenceServiceSpec, situation: Situation, target: Revision, stored: tuple[Revision, ...]
) -> Decision:
    created = tuple(names.group(observed.service.name, target.id, index) for index in situation.change.create)
    status = make_status(situation, conditions(situation, verdict(situation)))
    revisions = {revision.id: revision for revision in (*stored, target)}
    return Decision(
        create=_made_once(observed, situation, revisions),
        apply=_applied(observed, spec, situation, revisions, created),
        delete=_deleted(observed, situation, target, stored),
        status=status,
        events=events(situation, created, status),
        wake_after=wake_after(situation),
    )


def _made_once(observed: Observed, situation: Situation, revisions: dict[str, Revision]) -> tuple[Manifest, ...]:
    """The token, and the revisions that are wanted or in use, as far as they are not there yet."""
    service = observed.service
    used = {situation.target} | {group.revision for group in situation.kept}
    manifests = [admin_secret(service, observed.new_token)]
    for identifier in sorted(used & revisions.keys()):
        manifests += [revision_manifest(service, revisions[identifier]), config_manifest(service, revisions[identifier])]
    return tuple(made for made in manifests if (made["kind"], made["metadata"]["name"]) not in observed.children)


def _applied(
    observed: Observed,
    spec: InferenceServiceSpec,
    situation: Situation,
    revisions: dict[str, Revision],
    created: tuple[str, ...],
) -> tuple[Manifest, ...]:
    """The service's own children, then each group's. A group whose revision cannot be read is left as it is."""
    service = observed.service
    assert situation.asked is not None
    nodes = situation.asked.layout.nodes
    manifests = list(service_children(service, spec, observed.settings, nodes))
    for group in situation.kept:
        if group.revision in revisions:
            size = nodes if group.target else group.nodes
            manifests += group_children(service, revisions[group.revision], group.name, size)
    for name in created:
        manifests += group_children(service, revisions[situation.target], name, nodes)
    return tuple(manifests)


def _deleted(observed: Observed, situation: Situation, target: Revision, stored: tuple[Revision, ...]) -> tuple[Delete, ...]:
    groups = situation.groups
    in_use = frozenset({group.revision for group in groups.all} | {pod.revision for pod in groups.leaving})
    return (
        *group_deletions(observed, situation.change.remove, groups),
        *(delete for healing in situation.healing.values() for delete in deletions(healing)),
        *released(observed.pods),
        *revision_deletions(observed, outdated(stored, target, in_use)),
    )
