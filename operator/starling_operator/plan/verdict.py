"""The state of a service: a reason for machines and a message for people. Conditions follow from it."""

from collections.abc import Callable
from dataclasses import dataclass

from starling_operator.plan.elastic.messages import first_size, resizing
from starling_operator.plan.failure import has_served, restart_count
from starling_operator.plan.group import Group
from starling_operator.plan.readiness import waiting_reason
from starling_operator.plan.status_inputs import StatusInputs
from starling_operator.plan.timestamps import rfc3339


@dataclass(frozen=True, slots=True)
class Verdict:
    """`state`: "ready": as the spec asks; "reconciling": not yet; "stalled": somebody must act; "stopped": no group is to serve."""

    state: str
    reason: str
    message: str


def verdict(inputs: StatusInputs) -> Verdict:
    """Returns the verdict of the first rule that applies."""
    rules: tuple[Callable[[StatusInputs], Verdict | None], ...] = (
        _refused,
        _broken,
        _exhausted,
        _rolled_back,
        _not_resized,
        _stopped,
        _token_refused,
        _deadline_exceeded,
        _recovering,
        _pods_refused,
        _sleeping,
        _trying,
        _rolling,
        _draining,
        _scaling,
        _resizing,
        _starting,
        _router_starting,
        _routers_rolling,
    )
    found = next(filter(None, (rule(inputs) for rule in rules)), None)
    return found if found is not None else Verdict("ready", "Serving", _serving(inputs))


def _refused(inputs: StatusInputs) -> Verdict | None:
    refused = inputs.refusal
    return None if refused is None else Verdict("stalled", refused.reason, refused.message)


def _exhausted(inputs: StatusInputs) -> Verdict | None:
    assert inputs.service.spec is not None
    recovery = inputs.service.spec.recovery
    for name, decision in inputs.recoveries.items():
        if decision.exhausted:
            tried = f"{recovery.restart_budget} restarts in {recovery.window_seconds} s did not help"
            return Verdict("stalled", "RestartBudgetExhausted", f"{name} is not restarted again, {tried}: {decision.cause}")
    return None


def _broken(inputs: StatusInputs) -> Verdict | None:
    """Applies to a group that never served, after a first restart. One that served is restarted."""
    for group in inputs.current:
        cause = inputs.broken.get(group.name)
        if cause and not has_served(group) and not _first_restart(inputs, group):
            if inputs.old:
                failure = f"revision {group.revision} does not come up: {cause}"
                return Verdict("stalled", "RolloutStalled", f"{_count(inputs)} serve; {failure}")
            return Verdict("stalled", "GroupFailed", cause)
    return None


def _token_refused(inputs: StatusInputs) -> Verdict | None:
    """Applies while an agent refuses the operator's token: it may serve, but gives no report until its pod is recreated."""
    pod = next((pod for group in inputs.current for pod in group.remaining_pods if pod.refuses_token), None)
    if pod is None:
        return None
    refusal = f"{pod.name}: its agent refuses the operator's token, which Secret {inputs.token_secret} holds"
    return Verdict("stalled", "TokenRefused", f"{_count(inputs)} serve; {refusal}; delete the pod when its streams may end")


def _deadline_exceeded(inputs: StatusInputs) -> Verdict | None:
    """Applies to a group without progress. It is not given up, and may yet serve."""
    for group in inputs.current:
        if group.deadline_exceeded and not inputs.is_ready(group):
            limit = inputs.service.spec.rollout.progress_deadline_seconds if inputs.service.spec else 0
            why = inputs.unready[group.name]
            return Verdict("stalled", "ProgressDeadlineExceeded", f"{why}; {group.name} made no progress for over {limit} s")
    return None


def _first_restart(inputs: StatusInputs, group: Group) -> bool:
    decision = inputs.recoveries.get(group.name)
    return decision is not None and bool(decision.delete) and restart_count(group) == 0


def _stopped(inputs: StatusInputs) -> Verdict | None:
    if inputs.replicas > 0:
        return None
    reason, why = _why_stopped(inputs)
    if inputs.groups.all or inputs.groups.leaving:
        left = len({pod.group for pod in inputs.groups.leaving} | {group.name for group in inputs.groups.all})
        return Verdict("reconciling", reason, f"{why}; {left} groups drain")
    if reason != "Idle":
        return Verdict("stopped", reason, f"{why}; no group runs")
    unheard = _router_starting(inputs)
    return Verdict("stopped", reason, f"{why}; no group runs; the next request wakes it") if unheard is None else unheard


def _why_stopped(inputs: StatusInputs) -> tuple[str, str]:
    """Returns reason and cause."""
    spec, scaling = inputs.service.spec, inputs.scale.status
    if spec is not None and spec.suspend:
        return "Suspended", "spec.suspend is true"
    return ("ScaledToZero", "spec.replicas is 0") if scaling is None else ("Idle", scaling.message)


def _sleeping(inputs: StatusInputs) -> Verdict | None:
    """Applies while nobody asks for anything and groups are kept for the next request."""
    scaling = inputs.scale.status
    if scaling is None or not scaling.sleep_level:
        return None
    waiting = [group for group in inputs.current if not group.is_asleep]
    asleep = len(inputs.current) - len(waiting)
    if waiting or asleep != inputs.replicas:
        text = f"{scaling.message}; {asleep} of {inputs.replicas} groups sleep"
        return Verdict("reconciling", "Asleep", _with(text, inputs.unready[waiting[0].name] if waiting else _waits(inputs)))
    unheard = _router_starting(inputs)
    return (
        Verdict("stopped", "Asleep", f"{scaling.message}; {asleep} groups sleep; the next request wakes them")
        if unheard is None
        else unheard
    )


def _recovering(inputs: StatusInputs) -> Verdict | None:
    for name, decision in inputs.recoveries.items():
        if decision.wait > 0:
            # A time: a number of seconds would be another status each time.
            when = rfc3339(inputs.now + decision.wait)
            return Verdict("reconciling", "Recovering", f"{name} restarts at {when}: {decision.cause}")
        if decision.counted:
            return Verdict("reconciling", "Recovering", f"{name} restarts: {decision.cause}")
    return None


def _pods_refused(inputs: StatusInputs) -> Verdict | None:
    """Applies if a quota or an admission webhook refuses pods. Their StatefulSet tries again by itself."""
    for group in inputs.kept:
        if group.pod_creation_error:
            why = inputs.unready[group.name] or waiting_reason(group)
            return Verdict("reconciling", "PodsRefused", f"{_count(inputs)} serve; {why}")
    return None


def _rolling(inputs: StatusInputs) -> Verdict | None:
    if not inputs.groups.old:
        return None
    done = sum(inputs.is_ready(group) for group in inputs.current)
    text = f"{done} of {inputs.replicas} groups serve revision {inputs.target_revision}, {len(inputs.old)} older ones remain"
    return Verdict("reconciling", "RollingOut", _with(text, _waits(inputs)))


def _draining(inputs: StatusInputs) -> Verdict | None:
    """Applies while a node is drained, or is about to be and another group has yet to serve. After that, Ready is True again."""
    draining = next((group for group in inputs.rollout.remove if group.draining), None)
    if draining is not None:
        why = f"{draining.name} drains: a pod of it is being terminated"
        return Verdict("reconciling", "Draining", f"{_count(inputs)} serve; {why}")
    cordoned = next((group for group in inputs.current if group.cordoned), None)
    all_serve = len(inputs.ready) >= inputs.replicas + inputs.rollout.eviction_surge
    if not inputs.rollout.eviction_surge or all_serve or cordoned is None:
        return None
    text = f"{_count(inputs)} serve; {cordoned.name} is on a cordoned node; another group is created before it is evicted"
    return Verdict("reconciling", "Draining", _with(text, _waits(inputs)))


def _scaling(inputs: StatusInputs) -> Verdict | None:
    have, wanted = len(inputs.groups.current), inputs.replicas + inputs.rollout.eviction_surge
    if have == wanted and not inputs.rollout.remove:
        return None
    reason = "Scaling" if inputs.ready else "Progressing"
    return Verdict("reconciling", reason, _with(f"{have} of {wanted} groups exist", _waits(inputs)))


def _rolled_back(inputs: StatusInputs) -> Verdict | None:
    """Applies until the spec changes: what it asks for does not serve."""
    canary = inputs.canary.status if inputs.canary is not None else None
    if canary is None or canary.phase != "rolledBack":
        return None
    return Verdict("stalled", "CanaryRolledBack", f"{canary.message}; revision {canary.stable} serves on")


def _trying(inputs: StatusInputs) -> Verdict | None:
    canary, spec = inputs.canary, inputs.service.spec
    if canary is None or canary.status.stable != inputs.target_revision or inputs.replicas == 0:
        return None
    assert spec is not None and spec.rollout.canary is not None
    status, steps = canary.status, len(spec.rollout.canary.steps)
    text = f"{status.weight} % of the requests go to revision {status.revision}, the others to {status.stable}"
    at = f"step {status.step} of {steps}" if status.step else f"before step 1 of {steps}"
    until = f" until {rfc3339(canary.until)}" if canary.until is not None and not canary.wait_reason else ""
    return Verdict("reconciling", "Canary", _with(f"{text}; {at}{until}", canary.wait_reason))


def _not_resized(inputs: StatusInputs) -> Verdict | None:
    """Applies if groups cannot get the wanted size. They serve on at the old one."""
    if inputs.desired is None or inputs.replicas == 0:
        return None
    for group, text in resizing(inputs):
        if inputs.elastic_steps[group.name].gave_up:
            return Verdict("stalled", "ScalingFailed", f"{_count(inputs)} serve; {group.name}: {text}")
    return None


def _resizing(inputs: StatusInputs) -> Verdict | None:
    if inputs.desired is None:
        return None
    found = list(resizing(inputs))
    if not found:
        return None
    # The group that changes size, rather than those that wait for it.
    group, text = next((each for each in found if not inputs.elastic_steps[each[0].name].wait_reason), found[0])
    joining = [pod for pod in group.remaining_pods if pod.number >= group.gang_size and pod.waiting.startswith("Unschedulable")]
    left = f"; {len(found)} of {inputs.replicas} groups are to change" if inputs.replicas > 1 else ""
    named = f"{group.name}: {text}" if inputs.replicas > 1 else text
    return Verdict("reconciling", "Unschedulable" if joining else "Scaling", f"{named}{left}")


def _starting(inputs: StatusInputs) -> Verdict | None:
    waiting = [group for group in inputs.current if not inputs.is_ready(group)]
    if not waiting:
        return None
    first = waiting[0]
    cause = inputs.unready[first.name]
    if any(pod.waiting.startswith("Unschedulable") for group in waiting for pod in group.remaining_pods):
        reason = "Unschedulable"
    else:
        reason = "Recovering" if has_served(first) and not first.available and not _is_woken(inputs) else "Progressing"
    return Verdict("reconciling", reason, _with(f"{_count(inputs)} serve; {cause}", first_size(inputs, first)))


def _is_woken(inputs: StatusInputs) -> bool:
    """Says whether no group has served yet since the service was woken."""
    return inputs.scale.status is not None and not inputs.scale.status.started_at


def _router_starting(inputs: StatusInputs) -> Verdict | None:
    """Applies after all that is about groups: where no router is ready, no client reaches them."""
    state = inputs.router
    if state is None or state.ready > 0:
        return None
    return Verdict(
        "reconciling", "Progressing", _with(f"{_count(inputs)} serve; none of {state.replicas} routers is ready", state.problem)
    )


def _routers_rolling(inputs: StatusInputs) -> Verdict | None:
    state = inputs.router
    if state is None or (state.updated >= state.replicas and not state.old):
        return None
    text = f"{state.updated} of {state.replicas} routers run the present spec, {state.old} older ones remain"
    return Verdict("reconciling", "RollingOut", _with(f"{_count(inputs)} serve; {text}", state.problem))


def _serving(inputs: StatusInputs) -> str:
    assert inputs.expected is not None
    return f"{_count(inputs)} serve {inputs.expected.layout} at revision {inputs.target_revision}"


def _waits(inputs: StatusInputs) -> str:
    """Reason of the wait."""
    return inputs.rollout.wait_reason or next((why for why in inputs.unready.values() if why), "")


def _count(inputs: StatusInputs) -> str:
    return f"{len(inputs.ready)} of {inputs.replicas} groups"


def _with(text: str, detail: str) -> str:
    return f"{text}; {detail}" if detail else text
