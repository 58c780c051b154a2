"""Events for `kubectl describe`: transitions since the last status, each sent once."""

from starling_crds.v1alpha1.status import Condition, InferenceServiceStatus

from starling_operator.plan.decision import Event
from starling_operator.plan.elastic.messages import operation_text
from starling_operator.plan.status_inputs import StatusInputs

CREATED = "Created"
"""Reason of events that may wait until the status has the group: they come of what it lacks, and not of what is done."""
_REFUSALS = ("InvalidSpec", "Unsupported")


def events(inputs: StatusInputs, status: InferenceServiceStatus) -> tuple[Event, ...]:
    """Returns the events of this decision. `status`: the one that is about to be written."""
    return (
        *_spec_changed(inputs),
        *_idle_or_woken(inputs),
        *_created(inputs),
        *_nodes_released(inputs),
        *_canary_moved(inputs),
        *_restarted(inputs),
        *_drained(inputs),
        *_resized(inputs),
        *condition_events(inputs.service.status, status),
        *_rollout_finished(inputs.service.status, status),
    )


def _spec_changed(inputs: StatusInputs) -> tuple[Event, ...]:
    """Events of an edit: once for each generation, and not of the first."""
    old = inputs.service.status
    if inputs.refusal or old.observed_generation in (0, inputs.service.generation):
        return ()
    found = []
    started = old.revision.target and old.revision.target != inputs.spec_revision and inputs.groups.old
    if started:
        text = f"Replacing {len(inputs.groups.old)} groups by revision {inputs.target_revision}"
        found.append(Event("Normal", "RolloutStarted", text))
    have = len(inputs.groups.current)
    if not started and have != inputs.replicas and not inputs.groups.old:
        text = f"Scaling from {have} to {inputs.replicas} groups"
        found.append(Event("Normal", "Scaled", text))
    return tuple(found)


def _idle_or_woken(inputs: StatusInputs) -> tuple[Event, ...]:
    old, new = inputs.service.status.scaling, inputs.scale.status
    if old is None or new is None or (bool(old.wanted), bool(old.sleep_level)) == (bool(new.wanted), bool(new.sleep_level)):
        return ()
    if not new.wanted:
        return (Event("Normal", "Idle", f"No group is needed: {new.message}; the next request wakes the service"),)
    if new.sleep_level:
        return (Event("Normal", "Asleep", f"{new.wanted} groups go to sleep: {new.message}; the next request wakes them"),)
    if not old.wanted:
        return (Event("Normal", "Woken", f"A request came: scaling from 0 to {new.wanted} groups"),)
    why = "A rollout goes on" if inputs.groups.old or inputs.canary is not None else "A request came"
    return (Event("Normal", "Woken", f"{why}: {new.wanted} groups wake"),)


def _created(inputs: StatusInputs) -> tuple[Event, ...]:
    """Events of groups that are observed for the first time. A StatefulSet may be refused, so wanted groups do not count yet."""
    # Without a status, as when it was lost, each group would count as new.
    if inputs.service.status.observed_generation == 0:
        return ()
    new = [group for group in inputs.kept if group.previous is None]
    return tuple(Event("Normal", CREATED, f"Created group {group.name}{_pods(group.nodes)}") for group in new)


def _nodes_released(inputs: StatusInputs) -> tuple[Event, ...]:
    return (Event("Normal", "NodesReleased", inputs.rollout.wait_reason),) if inputs.rollout.releases_nodes else ()


def _pods(nodes: int) -> str:
    return "" if nodes == 1 else f" of {nodes} pods"


def _canary_moved(inputs: StatusInputs) -> tuple[Event, ...]:
    """Events of a canary's steps. That it was rolled back is an event of the condition Stalled."""
    before, now = inputs.service.status.canary, inputs.canary.status if inputs.canary is not None else None
    if now is None or now.phase == "rolledBack":
        return ()
    known = before is not None and (before.revision, before.phase, before.step) == (now.revision, now.phase, now.step)
    if known:
        return ()
    if now.phase == "passed":
        return (Event("Normal", "CanaryPassed", f"Revision {now.revision} passed its last step: it replaces {now.stable}"),)
    if now.step == 0:
        return (Event("Normal", "CanaryStarted", f"Trying revision {now.revision} next to revision {now.stable}"),)
    return (Event("Normal", "CanaryStep", f"{now.weight} % of the requests go to revision {now.revision}: step {now.step}"),)


def _restarted(inputs: StatusInputs) -> tuple[Event, ...]:
    return tuple(
        Event("Warning", "Restarted", f"{name}: {decision.cause}")
        for name, decision in inputs.recoveries.items()
        if decision.counted
    )


def _drained(inputs: StatusInputs) -> tuple[Event, ...]:
    """Events of groups that drain. They are removed by the same decision, so each is sent once."""
    text = "{}: a pod of it is being terminated; all of it drains, and another group replaces it"
    return tuple(Event("Normal", "Draining", text.format(group.name)) for group in inputs.rollout.remove if group.draining)


def _resized(inputs: StatusInputs) -> tuple[Event, ...]:
    """Events of each phase of each change of size."""
    found = []
    for group in inputs.kept:
        step = inputs.elastic_steps.get(group.name)
        now = step.operation if step is not None else None
        old = group.previous.operation if group.previous is not None else None
        if now is not None and (old is None or (old.id, old.phase) != (now.id, now.phase)):
            failed = now.phase in ("failed", "refused")
            reason = "ScalingFailed" if failed else "Resized" if now.phase == "done" else "Scaling"
            found.append(Event("Warning" if failed else "Normal", reason, f"{group.name}: {operation_text(inputs, now)}"))
    return tuple(found)


def condition_events(old: InferenceServiceStatus, new: InferenceServiceStatus) -> tuple[Event, ...]:
    """Returns the events of conditions: those that a refusal of the API server replaces are not sent."""
    found = []
    ready = condition_of(new, "Ready")
    if ready.status == "True" and _status(old, "Ready") != "True":
        found.append(Event("Normal", "Ready", ready.message))
    stalled = condition_of(new, "Stalled")
    if stalled.status == "True" and _stalled_before(old) != (stalled.reason, _refusal_message(stalled)):
        reason = "Refused" if stalled.reason in _REFUSALS else stalled.reason
        found.append(Event("Warning", reason, stalled.message))
    return tuple(found)


def _rollout_finished(old: InferenceServiceStatus, new: InferenceServiceStatus) -> tuple[Event, ...]:
    before, after = old.revision.current, new.revision.current
    if not before or before == after:
        return ()
    return (Event("Normal", "RolloutFinished", f"Revision {after} serves in place of {before}"),)


def _stalled_before(old: InferenceServiceStatus) -> tuple[str, str] | None:
    found = next((condition for condition in old.conditions if condition.type == "Stalled" and condition.status == "True"), None)
    return None if found is None else (found.reason, _refusal_message(found))


def _refusal_message(stalled: Condition) -> str:
    """A refusal with another message is a new event. That of a failing pod changes with each restart, so it is left out."""
    return stalled.message if stalled.reason in _REFUSALS else ""


def _status(status: InferenceServiceStatus, kind: str) -> str:
    return next((condition.status for condition in status.conditions if condition.type == kind), "")


def condition_of(status: InferenceServiceStatus, kind: str) -> Condition:
    """Returns a condition of a status that is about to be written: that has all of them."""
    return next(condition for condition in status.conditions if condition.type == kind)
