"""Where the service stands, in one word for machines and one sentence for people. The conditions all follow from it."""

from collections.abc import Callable
from dataclasses import dataclass

from starling_operator.plan.clock import rfc3339
from starling_operator.plan.elastic.words import first_size, resizing
from starling_operator.plan.failure import has_served, restarts
from starling_operator.plan.group import Group
from starling_operator.plan.proof import waits_for
from starling_operator.plan.status_inputs import StatusInputs


@dataclass(frozen=True, slots=True)
class Verdict:
    """state: "ready" as asked for; "moving" towards it; "stalled" until somebody acts; "off" on purpose."""

    state: str
    reason: str
    message: str


def verdict(situation: StatusInputs) -> Verdict:
    """The first rule that has something to say."""
    rules: tuple[Callable[[StatusInputs], Verdict | None], ...] = (
        _refused,
        _broken,
        _exhausted,
        _not_resized,
        _off,
        _token_refused,
        _overdue,
        _recovering,
        _pods_refused,
        _rolling,
        _moving_away,
        _scaling,
        _resizing,
        _coming_up,
    )
    found = next(filter(None, (rule(situation) for rule in rules)), None)
    return found if found is not None else Verdict("ready", "Serving", _serving(situation))


def _refused(situation: StatusInputs) -> Verdict | None:
    refused = situation.refused
    return None if refused is None else Verdict("stalled", refused.reason, refused.message)


def _exhausted(situation: StatusInputs) -> Verdict | None:
    assert situation.spec is not None
    recovery = situation.spec.recovery
    for name, healing in situation.healing.items():
        if healing.exhausted:
            tried = f"{recovery.restart_budget} restarts in {recovery.window_seconds} s did not heal it"
            return Verdict("stalled", "RestartBudgetExhausted", f"{name} is left alone, {tried}: {healing.cause}")
    return None


def _broken(situation: StatusInputs) -> Verdict | None:
    """A group that once served is restarted and is no reason to give up; one that never did is, after a first restart."""
    for group in situation.current:
        cause = situation.failures.get(group.name)
        if cause and not has_served(group) and not _first_restart(situation, group):
            if situation.old:
                return Verdict("stalled", "RolloutStalled", f"revision {group.revision} does not come up: {cause}")
            return Verdict("stalled", "GroupFailed", cause)
    return None


def _token_refused(situation: StatusInputs) -> Verdict | None:
    """It may well serve, and pods that are made anew mount the operator's token; but nobody can tell before."""
    pod = next((pod for group in situation.current for pod in group.live if pod.refuses_token), None)
    if pod is None:
        return None
    told = f"{pod.name}: its agent refuses the operator's token, which Secret {situation.token_secret} holds"
    return Verdict("stalled", "TokenRefused", f"{_count(situation)} serve; {told}; delete the pod when its streams may end")


def _overdue(situation: StatusInputs) -> Verdict | None:
    """Whatever it waits for; it is not given up, and may yet come."""
    for group in situation.current:
        if group.overdue and not situation.is_ready(group):
            limit = situation.spec.rollout.progress_deadline_seconds if situation.spec else 0
            why = situation.unready[group.name]
            return Verdict("stalled", "ProgressDeadlineExceeded", f"{why}; {group.name} came no further for over {limit} s")
    return None


def _first_restart(situation: StatusInputs, group: Group) -> bool:
    healing = situation.healing.get(group.name)
    return healing is not None and bool(healing.delete) and restarts(group) == 0


def _off(situation: StatusInputs) -> Verdict | None:
    if situation.replicas > 0:
        return None
    suspended = situation.spec is not None and situation.spec.suspend
    reason, why = ("Suspended", "spec.suspend is true") if suspended else ("ScaledToZero", "spec.replicas is 0")
    if situation.groups.all or situation.groups.leaving:
        left = len({pod.group for pod in situation.groups.leaving} | {group.name for group in situation.groups.all})
        return Verdict("moving", reason, f"{why}; {left} groups drain")
    return Verdict("off", reason, f"{why}; no group runs")


def _recovering(situation: StatusInputs) -> Verdict | None:
    for name, healing in situation.healing.items():
        if healing.wait > 0:
            # The time itself, for a count of seconds would be another status each time.
            when = rfc3339(situation.now + healing.wait)
            return Verdict("moving", "Recovering", f"{name} restarts at {when}: {healing.cause}")
        if healing.counted:
            return Verdict("moving", "Recovering", f"{name} restarts: {healing.cause}")
    return None


def _pods_refused(situation: StatusInputs) -> Verdict | None:
    """A quota or an admission webhook. Its StatefulSet tries again by itself, so that it may pass when the next pod goes."""
    for group in situation.kept:
        if group.refused:
            why = situation.unready[group.name] or waits_for(group)
            return Verdict("moving", "PodsRefused", f"{_count(situation)} serve; {why}")
    return None


def _rolling(situation: StatusInputs) -> Verdict | None:
    if not situation.groups.old:
        return None
    done = sum(situation.is_ready(group) for group in situation.current)
    text = f"{done} of {situation.replicas} groups serve revision {situation.target}, {len(situation.old)} older ones are left"
    return Verdict("moving", "RollingOut", _with(text, _waits(situation)))


def _moving_away(situation: StatusInputs) -> Verdict | None:
    """Its node is emptied, or about to be. A group that came first and serves may wait for that for as long as it takes."""
    going = next((group for group in situation.change.remove if group.going), None)
    if going is not None:
        return Verdict("moving", "MovingAway", f"{_count(situation)} serve; {going.name} drains: a pod of it is taken away")
    cordoned = next((group for group in situation.current if group.cordoned), None)
    whole = len(situation.ready) >= situation.replicas + situation.change.ahead
    if not situation.change.ahead or whole or cordoned is None:
        return None
    text = f"{_count(situation)} serve; {cordoned.name} is on a node that takes no new pods, so that another group comes first"
    return Verdict("moving", "MovingAway", _with(text, _waits(situation)))


def _scaling(situation: StatusInputs) -> Verdict | None:
    have, wanted = len(situation.groups.current), situation.replicas + situation.change.ahead
    if have == wanted and not situation.change.remove:
        return None
    reason = "Scaling" if situation.ready else "Progressing"
    return Verdict("moving", reason, _with(f"{have} of {wanted} groups exist", _waits(situation)))


def _not_resized(situation: StatusInputs) -> Verdict | None:
    """A size that cannot be had: the groups serve on at the old one."""
    if situation.desired is None or situation.replicas == 0:
        return None
    for group, text in resizing(situation):
        if situation.steps[group.name].gave_up:
            return Verdict("stalled", "ScalingFailed", f"{_count(situation)} serve; {group.name}: {text}")
    return None


def _resizing(situation: StatusInputs) -> Verdict | None:
    if situation.desired is None:
        return None
    found = list(resizing(situation))
    if not found:
        return None
    # The one that moves, rather than those that wait for it.
    group, text = next((each for each in found if not situation.steps[each[0].name].waits), found[0])
    joining = [pod for pod in group.live if pod.number >= group.gang and pod.waiting.startswith("Unschedulable")]
    left = f"; {len(found)} of {situation.replicas} groups are to change" if situation.replicas > 1 else ""
    named = f"{group.name}: {text}" if situation.replicas > 1 else text
    return Verdict("moving", "Unschedulable" if joining else "Scaling", f"{named}{left}")


def _coming_up(situation: StatusInputs) -> Verdict | None:
    waiting = [group for group in situation.current if not situation.is_ready(group)]
    if not waiting:
        return None
    first = waiting[0]
    cause = situation.unready[first.name]
    if any(pod.waiting.startswith("Unschedulable") for group in waiting for pod in group.live):
        reason = "Unschedulable"
    else:
        reason = "Recovering" if has_served(first) and not first.available else "Progressing"
    return Verdict("moving", reason, _with(f"{_count(situation)} serve; {cause}", first_size(situation, first)))


def _serving(situation: StatusInputs) -> str:
    assert situation.asked is not None
    return f"{_count(situation)} serve {situation.asked.layout} at revision {situation.target}"


def _waits(situation: StatusInputs) -> str:
    """What holds it up."""
    return situation.change.waits or next((why for why in situation.unready.values() if why), "")


def _count(situation: StatusInputs) -> str:
    return f"{len(situation.ready)} of {situation.replicas} groups"


def _with(text: str, detail: str) -> str:
    return f"{text}; {detail}" if detail else text
