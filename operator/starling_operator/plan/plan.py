"""The function `plan`; the package's docstring has its steps, formulas and invariants."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starling_operator.plan import names
from starling_operator.plan.admin_token import secret_name
from starling_operator.plan.canary import canary_decision, kept_canary, read_canary, taken_back
from starling_operator.plan.canary_notice import canary_notice, notice_deletion, stored_notice
from starling_operator.plan.conditions import conditions
from starling_operator.plan.decision import Decision
from starling_operator.plan.disruption import disruption_budget, min_available
from starling_operator.plan.elastic.next_step import elastic_steps
from starling_operator.plan.elastic.parallelism_scale import desired_size, scale_status
from starling_operator.plan.endpoint_policy import seconds_to_close
from starling_operator.plan.events import condition_of, events
from starling_operator.plan.failure import broken_cause, seconds_to_return
from starling_operator.plan.gangs import gang_release
from starling_operator.plan.gateway import seconds_of_pool
from starling_operator.plan.group import Group, read_groups
from starling_operator.plan.notice import service_notice
from starling_operator.plan.objects import NewGroup, applied_objects, created_objects, deleted_objects, deleted_pods
from starling_operator.plan.observed import Observed
from starling_operator.plan.pinned_commit import commit_of, common_weights
from starling_operator.plan.readiness import (
    ExpectedReports,
    expected_reports,
    is_at_wanted_size,
    stored_reports,
    unready_reason,
    waiting_reason,
)
from starling_operator.plan.recovery import drain_decision, recovery_decisions
from starling_operator.plan.refusals import Refusal, Unsupported, not_in_this_release, refusal
from starling_operator.plan.requeue import requeue_after
from starling_operator.plan.revision import Revision, read_revisions, stored_revisions
from starling_operator.plan.rollout import RolloutStep, WantedGroups, rollout_step, with_canary, with_gang_release, without_refused
from starling_operator.plan.router import leads_to_routers, router_rollout, router_state, seconds_to_stay
from starling_operator.plan.scaling import remembered_scale, wanted_scale
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
    canary = read_canary(service, spec, revisions, observed.now)
    aim = canary.aim if canary is not None else revisions.target
    tried = canary.tried if canary is not None and canary.tried is not aim else None
    groups = read_groups(observed, aim.id, (revisions.target, *revisions.stored), canary=tried.id if tried is not None else "")
    scale = wanted_scale(observed, spec, rolls=bool(groups.old) or (canary is not None and canary.is_tried))
    desired = desired_size(observed, spec)
    asked = expected_reports(spec, revisions.target, desired)
    expected = _with_weights(asked if tried is None else stored_reports(aim), observed, aim, groups.current)
    of_canary = _with_weights(asked, observed, revisions.target, groups.canary)
    unready = {group.name: unready_reason(group, of_canary if group.is_canary else expected) for group in groups.all}
    broken = {group.name: cause for group in groups.all if (cause := broken_cause(group))}

    wanted = WantedGroups(
        replicas=scale.groups,
        nodes=expected.layout.nodes,
        rollout=spec.rollout,
        broken=any(group.name in broken for group in groups.current),
        sees_cordons=observed.cordoned is not None,
        asleep=scale.status is not None and scale.status.sleep_level > 0,
    )
    named = partial(names.group, service.name, aim.id)
    rollout = rollout_step(
        groups,
        wanted,
        ready=lambda group: not unready[group.name],
        returning=lambda group: seconds_to_return(group, observed.now) > 0,
        name=named,
    )
    trial = canary_decision(canary, observed, groups, scale.groups, unready, broken) if canary is not None else None
    if trial is not None and tried is not None:
        of_tried = partial(names.group, service.name, tried.id)
        rollout = with_canary(rollout, groups, trial.groups, asked.layout.nodes, lambda group: not unready[group.name], of_tried)
    release = gang_release(observed, read_time(service.status.gang_released_at))
    rollout = with_gang_release(rollout, groups, release, nodes=max(expected.layout.nodes, asked.layout.nodes))
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
        target_revision=aim.id,
        canary=trial,
        taken_back=taken_back(observed, revisions.target) if canary is None else None,
        scale=scale,
        expected=expected,
        unready=unready,
        broken=broken,
        rollout=rollout,
        recoveries=recoveries,
        desired=desired,
        elastic_steps=steps,
        min_available=min_available(groups, coming, wanted, lambda group: not unready[group.name], broken, observed.now),
        token_secret=secret_name(service.name, observed.token),
        router=router_rollout(observed, spec),
        router_stays=seconds_to_stay(observed),
        pool_stays=seconds_of_pool(observed),
        endpoint_closes=seconds_to_close(observed, spec, to_routers=leads_to_routers(observed)),
    )
    created = [NewGroup(named(number), aim, expected.layout.nodes) for number in rollout.create]
    if tried is not None:
        created += [NewGroup(of_tried(number), tried, asked.layout.nodes) for number in rollout.create_canary]
    judged = verdict(inputs)
    status = make_status(inputs, conditions(inputs, judged))
    size = min((group.elastic.effective for group in inputs.current if group.elastic is not None), default=0)
    sized = scale_status(observed, desired, size, condition_of(status, "Ready")) if desired is not None else None
    notice = canary_notice(observed, status.canary)
    return Decision(
        create=created_objects(observed, inputs, revisions),
        apply=(*stored_notice(observed, notice), *applied_objects(observed, spec, inputs, revisions, created)),
        delete=(*deleted_objects(observed, inputs, revisions), *notice_deletion(observed, notice)),
        status=status,
        child_statuses=(sized,) if sized is not None else (),
        begins_operation=any(step.begins_operation for step in steps.values()),
        notice=service_notice(inputs, judged, notice),
        scale_calls=tuple(step.call for step in steps.values() if step.call is not None),
        events=events(inputs, status),
        requeue_after=requeue_after(inputs),
    )


def _with_weights(reports: ExpectedReports, observed: Observed, revision: Revision, groups: Sequence[Group]) -> ExpectedReports:
    return replace(reports, commit=commit_of(observed, revision), weights=common_weights(groups))


def _refused(observed: Observed, refused: Refusal) -> Decision:
    """Reports a refused spec in the status, and lets nodes be drained meanwhile: evicted groups keep their names."""
    groups = read_groups(observed, target="", revisions=stored_revisions(observed))
    unready = {group.name: waiting_reason(group) for group in groups.all}
    broken = [group.name for group in groups.all if broken_cause(group)]
    recoveries = {group.name: drain for group in groups.all if (drain := drain_decision(group))}
    last = observed.service.status.canary
    wanted = WantedGroups.from_groups(groups, observed.service.spec, sees_cordons=observed.cordoned is not None)
    inputs = StatusInputs(
        service=observed.service,
        settings=observed.settings,
        now=observed.now,
        groups=groups,
        target_revision="",
        canary=kept_canary(last),
        taken_back=last if last is not None and last.phase == "takenBack" else None,
        scale=remembered_scale(observed.service),
        refusal=refused,
        unready=unready,
        recoveries=recoveries,
        min_available=min_available(groups, RolloutStep(), wanted, lambda group: not unready[group.name], broken, observed.now),
        router=router_state(observed),
    )
    judged = verdict(inputs)
    status = make_status(inputs, conditions(inputs, judged))
    notice = canary_notice(observed, status.canary)
    budget = (disruption_budget(observed.service, inputs.min_available),) if groups.all else ()
    return Decision(
        apply=(*stored_notice(observed, notice), *budget),
        delete=(*deleted_pods(observed, inputs), *notice_deletion(observed, notice)),
        status=status,
        notice=service_notice(inputs, judged, notice),
        events=events(inputs, status),
        requeue_after=requeue_after(inputs),
    )
