"""When to decide again although nothing may have changed: back-offs, silence and windows end by themselves."""

from collections.abc import Iterator

from starling_operator.plan.disruption import PLACING_SECONDS
from starling_operator.plan.failure import has_served, silence_limit
from starling_operator.plan.recovery import restart_times
from starling_operator.plan.status_inputs import StatusInputs

_MARGIN = 0.5
"""Past the moment itself, so that it has surely come."""
_UNTOLD = 4.0
"""Seconds between two looks at what no watch tells: a node, and why no pod is made."""


def wake_after(situation: StatusInputs) -> float | None:
    """Seconds; None: never."""
    return min((seconds + _MARGIN for seconds in _moments(situation)), default=None)


def _moments(situation: StatusInputs) -> Iterator[float]:
    yield from _unplanned(situation)
    spec = situation.spec
    if spec is None or situation.refused is not None:
        return
    if any(group.missing for group in situation.kept):
        yield _UNTOLD
    if situation.nodes > 1 and any(not group.placed for group in situation.kept):
        # The queue of groups that wait for nodes moves as other services' do.
        yield _UNTOLD
    if situation.change.waits and situation.service.status.gang_released_at:
        yield _UNTOLD
    yield from (step.wake for step in situation.steps.values() if step.wake is not None)
    limit = silence_limit(spec.recovery.progress_timeout_seconds)
    for group in situation.kept:
        healing = situation.healing.get(group.name)
        if healing is not None and healing.wait > 0:
            yield healing.wait
        due = group.progressed_at + spec.rollout.progress_deadline_seconds - situation.now
        if group.target and due >= 0 and not situation.is_ready(group):
            yield due
        times = restart_times(group, spec.recovery, situation.now)
        if times:
            # One restart fewer counts then: the status says so, and a group that was given up may be restarted.
            yield times[0] + spec.recovery.window_seconds - situation.now
        # A group that never served, or whose failure is known, is not asked whether it is silent.
        watched = group.members if healing is None and has_served(group) else ()
        for pod in watched:
            if pod.phase == "Running" and not pod.ready and pod.report_age is not None and pod.report_age <= limit:
                yield limit - pod.report_age


def _unplanned(situation: StatusInputs) -> Iterator[float]:
    """Of nodes that are lost or emptied, whatever the spec says."""
    if any(pod.evicted and not pod.lost for pod in situation.pods):
        yield _UNTOLD
    if any(group.cordoned for group in situation.kept):
        unplaced = (pod.created_at for pod in situation.pods if pod.waiting.startswith("Unschedulable"))
        yield from (left for since in unplaced if (left := since + PLACING_SECONDS - situation.now) > 0)
