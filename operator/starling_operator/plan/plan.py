"""The decision: from everything that is seen to everything that is to be done. Same input, same output; nothing is remembered."""

from dataclasses import replace
from functools import partial

from starling_operator.plan import names
from starling_operator.plan.clock import read_time
from starling_operator.plan.conditions import conditions
from starling_operator.plan.decision import Decision
from starling_operator.plan.disruption import disruption_budget, min_available
from starling_operator.plan.elastic.child import scale_status
from starling_operator.plan.elastic.desired import desired_size
from starling_operator.plan.elastic.turns import steps_of
from starling_operator.plan.events import events, find
from starling_operator.plan.failure import broken
from starling_operator.plan.gangs import release
from starling_operator.plan.group import read_groups
from starling_operator.plan.objects import applied, deleted, deleted_pods, made_once
from starling_operator.plan.observed import Observed
from starling_operator.plan.pin import commit_of, common_weights
from starling_operator.plan.proof import asked_of, is_whole, unproven, waits_for
from starling_operator.plan.recovery import drained, heal_groups
from starling_operator.plan.refusals import Refusal, Unsupported, not_in_this_release, refusal
from starling_operator.plan.revision import read_revisions, stored_revisions
from starling_operator.plan.rollout import RolloutStep, WantedGroups, change_groups, let_go, without_refused
from starling_operator.plan.status import make_status
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.token import secret_name
from starling_operator.plan.verdict import verdict
from starling_operator.plan.waking import wake_after


def plan(observed: Observed, unsupported: Unsupported = not_in_this_release) -> Decision:
    """What is to be done about one service. `unsupported` names what the engine cannot do of a spec."""
    refused = refusal(observed, unsupported)
    if refused is not None:
        return _refused(observed, refused)
    service, spec = observed.service, observed.service.spec
    assert spec is not None

    revisions = read_revisions(observed, spec)
    groups = read_groups(observed, revisions.target.id, (revisions.target, *revisions.stored))
    desired = desired_size(observed, spec)
    asked = replace(
        asked_of(spec, revisions.target, desired),
        commit=commit_of(observed, revisions.target),
        weights=common_weights(groups.current),
    )
    unready = {group.name: unproven(group, asked) for group in groups.all}
    failures = {group.name: cause for group in groups.all if (cause := broken(group))}

    is_broken, sees = any(group.name in failures for group in groups.current), observed.cordoned is not None
    wanted = WantedGroups.of(spec, asked.layout.nodes, broken=is_broken, sees_cordons=sees)
    named = partial(names.group, service.name, revisions.target.id)
    change = change_groups(groups, wanted, ready=lambda group: not unready[group.name], name=named)
    released = release(observed, read_time(service.status.gang_released_at))
    change = let_go(change, groups, released, nodes=asked.layout.nodes)
    # A group that goes anyway is left to drain.
    healing = heal_groups((group for group in groups.all if group not in change.remove), spec.recovery, observed.now)

    steps = steps_of(
        observed,
        spec,
        desired,
        kept=(group for group in groups.all if group not in change.remove),
        serves=lambda group: not unready[group.name] and group.name not in healing,
        whole=lambda group: is_whole(group, asked),
    )

    coming = without_refused(change, observed.refused_children, named)
    situation = StatusInputs(
        service=service,
        settings=observed.settings,
        now=observed.now,
        groups=groups,
        target=revisions.target.id,
        asked=asked,
        unready=unready,
        failures=failures,
        change=change,
        healing=healing,
        desired=desired,
        steps=steps,
        min_available=min_available(groups, coming, wanted, lambda group: not unready[group.name], failures, observed.now),
        token_secret=secret_name(service.name, observed.token),
    )
    created = tuple(map(named, change.create))
    status = make_status(situation, conditions(situation, verdict(situation)))
    sized = scale_status(observed, desired, situation.effective, find(status, "Ready")) if desired is not None else None
    return Decision(
        create=made_once(observed, situation, revisions),
        apply=applied(observed, spec, situation, revisions, created),
        delete=deleted(observed, situation, revisions),
        status=status,
        statuses=(sized,) if sized is not None else (),
        begins=any(step.begins for step in steps.values()),
        scale=tuple(step.call for step in steps.values() if step.call is not None),
        events=events(situation, status),
        wake_after=wake_after(situation),
    )


def _refused(observed: Observed, refused: Refusal) -> Decision:
    """The status tells, and no node waits for the spec to be mended: groups on it come back in their own place."""
    groups = read_groups(observed, target="", revisions=stored_revisions(observed))
    unready = {group.name: waits_for(group) for group in groups.all}
    failures = [group.name for group in groups.all if broken(group)]
    healing = {group.name: drain for group in groups.all if (drain := drained(group))}
    wanted = WantedGroups.as_it_is(groups, observed.service.spec, sees_cordons=observed.cordoned is not None)
    situation = StatusInputs(
        service=observed.service,
        settings=observed.settings,
        now=observed.now,
        groups=groups,
        target="",
        refused=refused,
        unready=unready,
        healing=healing,
        min_available=min_available(groups, RolloutStep(), wanted, lambda group: not unready[group.name], failures, observed.now),
    )
    status = make_status(situation, conditions(situation, verdict(situation)))
    return Decision(
        apply=(disruption_budget(observed.service, situation.min_available),) if groups.all else (),
        delete=deleted_pods(observed, situation),
        status=status,
        events=events(situation, status),
        wake_after=wake_after(situation),
    )
