"""The function `plan`; the package's docstring has its steps, formulas and invariants."""

from dataclasses import replace
from functools import partial

from starling_operator.plan import names
from starling_operator.plan.admin_token import secret_name
from starling_operator.plan.conditions import conditions
from starling_operator.plan.decision import Decision
from starling_operator.plan.disruption import disruption_budget, min_available
from starling_operator.plan.elastic.next_step import elastic_steps
from starling_operator.plan.elastic.parallelism_scale import desired_size, scale_status
from starling_operator.plan.events import condition_of, events
from starling_operator.plan.failure import broken_cause
from starling_operator.plan.gangs import gang_release
from starling_operator.plan.group import read_groups
from starling_operator.plan.objects import applied_objects, created_objects, deleted_objects, deleted_pods
from starling_operator.plan.observed import Observed
from starling_operator.plan.pinned_commit import commit_of, common_weights
from starling_operator.plan.readiness import expected_reports, is_at_wanted_size, unready_reason, waiting_reason
from starling_operator.plan.recovery import drain_decision, recovery_decisions
from starling_operator.plan.refusals import Refusal, Unsupported, not_in_this_release, refusal
from starling_operator.plan.requeue import requeue_after
from starling_operator.plan.revision import read_revisions, stored_revisions
from starling_operator.plan.rollout import RolloutStep, WantedGroups, rollout_step, with_gang_release, without_refused
from starling_operator.plan.status import make_status
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.timestamps import read_time
from starling_operator.plan.verdict import verdict


def plan(observed: Observed, unsupported: Unsupported = not_in_this_release) -> Decision:
    """Decides what to do about one service. `unsupported` names what the engine cannot do of a spec."""
    refused = refusal(observed, unsupported)
    if refused is not None:
        return _refused(observed, refused)
    service, spec = observed.service, observed.service.spec
    assert spec is not None

    revisions = read_revisions(observed, spec)
    groups = read_groups(observed, revisions.target.id, (revisions.target, *revisions.stored))
    desired = desired_size(observed, spec)
    expected = replace(
        expected_reports(spec, revisions.target, desired),
        commit=commit_of(observed, revisions.target),
        weights=common_weights(groups.current),
    )
    unready = {group.name: unready_reason(group, expected) for group in groups.all}
    broken = {group.name: cause for group in groups.all if (cause := broken_cause(group))}

    is_broken, sees = any(group.name in broken for group in groups.current), observed.cordoned is not None
    wanted = WantedGroups.from_spec(spec, expected.layout.nodes, broken=is_broken, sees_cordons=sees)
    named = partial(names.group, service.name, revisions.target.id)
    rollout = rollout_step(groups, wanted, ready=lambda group: not unready[group.name], name=named)
    release = gang_release(observed, read_time(service.status.gang_released_at))
    rollout = with_gang_release(rollout, groups, release, nodes=expected.layout.nodes)
    # A group that is removed anyway is left to drain.
    recoveries = recovery_decisions((group for group in groups.all if group not in rollout.remove), spec.recovery, observed.now)

    steps = elastic_steps(
        observed,
        spec,
        desired,
        kept=(group for group in groups.all if group not in rollout.remove),
        serves=lambda group: not unready[group.name] and group.name not in recoveries,
        at_wanted_size=lambda group: is_at_wanted_size(group, expected),
    )

    coming = without_refused(rollout, observed.refused_children, named)
    inputs = StatusInputs(
        service=service,
        settings=observed.settings,
        now=observed.now,
        groups=groups,
        target_revision=revisions.target.id,
        expected=expected,
        unready=unready,
        broken=broken,
        rollout=rollout,
        recoveries=recoveries,
        desired=desired,
        elastic_steps=steps,
        min_available=min_available(groups, coming, wanted, lambda group: not unready[group.name], broken, observed.now),
        token_secret=secret_name(service.name, observed.token),
    )
    created = tuple(map(named, rollout.create))
    status = make_status(inputs, conditions(inputs, verdict(inputs)))
    size = min((group.elastic.effective for group in inputs.current if group.elastic is not None), default=0)
    sized = scale_status(observed, desired, size, condition_of(status, "Ready")) if desired is not None else None
    return Decision(
        create=created_objects(observed, inputs, revisions),
        apply=applied_objects(observed, spec, inputs, revisions, created),
        delete=deleted_objects(observed, inputs, revisions),
        status=status,
        child_statuses=(sized,) if sized is not None else (),
        begins_operation=any(step.begins_operation for step in steps.values()),
        scale_calls=tuple(step.call for step in steps.values() if step.call is not None),
        events=events(inputs, status),
        requeue_after=requeue_after(inputs),
    )


def _refused(observed: Observed, refused: Refusal) -> Decision:
    """Reports a refused spec in the status, and lets nodes be drained meanwhile: evicted groups keep their names."""
    groups = read_groups(observed, target="", revisions=stored_revisions(observed))
    unready = {group.name: waiting_reason(group) for group in groups.all}
    broken = [group.name for group in groups.all if broken_cause(group)]
    recoveries = {group.name: drain for group in groups.all if (drain := drain_decision(group))}
    wanted = WantedGroups.from_groups(groups, observed.service.spec, sees_cordons=observed.cordoned is not None)
    inputs = StatusInputs(
        service=observed.service,
        settings=observed.settings,
        now=observed.now,
        groups=groups,
        target_revision="",
        refusal=refused,
        unready=unready,
        recoveries=recoveries,
        min_available=min_available(groups, RolloutStep(), wanted, lambda group: not unready[group.name], broken, observed.now),
    )
    status = make_status(inputs, conditions(inputs, verdict(inputs)))
    return Decision(
        apply=(disruption_budget(observed.service, inputs.min_available),) if groups.all else (),
        delete=deleted_pods(observed, inputs),
        status=status,
        events=events(inputs, status),
        requeue_after=requeue_after(inputs),
    )
