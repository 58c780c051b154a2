"""Events for `kubectl describe`: transitions since the last status, each told once."""

from starling_crds.v1alpha1.status import Condition, InferenceServiceStatus

from starling_operator.plan.decision import Event
from starling_operator.plan.elastic.words import operation_text
from starling_operator.plan.status_inputs import StatusInputs

_REFUSALS = ("InvalidSpec", "Unsupported")


def events(situation: StatusInputs, status: InferenceServiceStatus) -> tuple[Event, ...]:
    """`status`: the one that is about to be written."""
    return (
        *_spec_changed(situation),
        *_created(situation),
        *_let_go(situation),
        *_restarted(situation),
        *_taken_away(situation),
        *_resized(situation),
        *_conditions_changed(situation.service.status, status),
        *_rollout_finished(situation.service.status, status),
    )


def _spec_changed(situation: StatusInputs) -> tuple[Event, ...]:
    """Only where there was something before, and only once for a generation."""
    old = situation.service.status
    if situation.refused or old.observed_generation in (0, situation.service.generation):
        return ()
    told = []
    started = old.revision.target and old.revision.target != situation.target and situation.groups.old
    if started:
        text = f"Replacing {len(situation.groups.old)} groups by revision {situation.target}"
        told.append(Event("Normal", "RolloutStarted", text))
    if not started and len(situation.groups.all) != situation.replicas and not situation.groups.old:
        text = f"Scaling from {len(situation.groups.all)} to {situation.replicas} groups"
        told.append(Event("Normal", "Scaled", text))
    return tuple(told)


def _created(situation: StatusInputs) -> tuple[Event, ...]:
    """When they are seen for the first time: what was asked for may yet be refused. A status that was lost knows of none."""
    if situation.service.status.observed_generation == 0:
        return ()
    new = [group for group in situation.kept if group.previous is None]
    return tuple(Event("Normal", "Created", f"Created group {group.name}{_pods(group.nodes)}") for group in new)


def _let_go(situation: StatusInputs) -> tuple[Event, ...]:
    return (Event("Normal", "LetGo", situation.change.waits),) if situation.change.released else ()


def _pods(nodes: int) -> str:
    return "" if nodes == 1 else f" of {nodes} pods"


def _restarted(situation: StatusInputs) -> tuple[Event, ...]:
    return tuple(
        Event("Warning", "Restarted", f"{name}: {healing.cause}") for name, healing in situation.healing.items() if healing.counted
    )


def _taken_away(situation: StatusInputs) -> tuple[Event, ...]:
    """It is removed by the same decision, so that this is told once."""
    text = "{}: a pod of it is taken away; all of it drains, and another group takes its place"
    return tuple(Event("Normal", "MovingAway", text.format(group.name)) for group in situation.change.remove if group.going)


def _resized(situation: StatusInputs) -> tuple[Event, ...]:
    """Each phase of each change of size."""
    told = []
    for group in situation.kept:
        step = situation.steps.get(group.name)
        now = step.operation if step is not None else None
        old = group.previous.operation if group.previous is not None else None
        if now is not None and (old is None or (old.id, old.phase) != (now.id, now.phase)):
            failed = now.phase in ("failed", "refused")
            reason = "ScalingFailed" if failed else "Resized" if now.phase == "done" else "Scaling"
            told.append(Event("Warning" if failed else "Normal", reason, f"{group.name}: {operation_text(situation, now)}"))
    return tuple(told)


def _conditions_changed(old: InferenceServiceStatus, new: InferenceServiceStatus) -> tuple[Event, ...]:
    told = []
    ready = find(new, "Ready")
    if ready.status == "True" and _status(old, "Ready") != "True":
        told.append(Event("Normal", "Ready", ready.message))
    stalled = find(new, "Stalled")
    if stalled.status == "True" and _stalled_before(old) != (stalled.reason, _told_by(stalled)):
        reason = "Refused" if stalled.reason in _REFUSALS else stalled.reason
        told.append(Event("Warning", reason, stalled.message))
    return tuple(told)


def _rollout_finished(old: InferenceServiceStatus, new: InferenceServiceStatus) -> tuple[Event, ...]:
    before, after = old.revision.current, new.revision.current
    if not before or before == after:
        return ()
    return (Event("Normal", "RolloutFinished", f"Revision {after} serves in place of {before}"),)


def _stalled_before(old: InferenceServiceStatus) -> tuple[str, str] | None:
    found = next((condition for condition in old.conditions if condition.type == "Stalled" and condition.status == "True"), None)
    return None if found is None else (found.reason, _told_by(found))


def _told_by(stalled: Condition) -> str:
    """Another refusal is news; the message of a failing pod changes with each of its restarts."""
    return stalled.message if stalled.reason in _REFUSALS else ""


def _status(status: InferenceServiceStatus, kind: str) -> str:
    return next((condition.status for condition in status.conditions if condition.type == kind), "")


def find(status: InferenceServiceStatus, kind: str) -> Condition:
    """All conditions are there in a status that is about to be written."""
    return next(condition for condition in status.conditions if condition.type == kind)
