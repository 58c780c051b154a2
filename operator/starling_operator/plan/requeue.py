"""Time of the next decision although nothing may have changed: back-offs, silence and windows end by themselves."""

import math
from collections.abc import Iterator

from starling_operator.plan.disruption import SCHEDULING_SECONDS
from starling_operator.plan.failure import has_served, seconds_to_return, silence_limit
from starling_operator.plan.recovery import restart_times
from starling_operator.plan.status_inputs import StatusInputs

_MARGIN = 0.5
"""Seconds past the moment itself, so that it has surely come."""
_POLL_SECONDS = 4.0
"""Seconds between two looks at what no watch shows: a node, and why no pod is created."""


def requeue_after(inputs: StatusInputs) -> float | None:
    """Returns seconds; None: never."""
    return min((seconds + _MARGIN for seconds in _moments(inputs)), default=None)


def _moments(inputs: StatusInputs) -> Iterator[float]:
    yield from _node_moments(inputs)
    spec = inputs.service.spec
    if spec is None or inputs.refusal is not None:
        return
    if inputs.scale.due is not None:
        yield inputs.scale.due
    yield from (ends for ends in (inputs.router_stays, inputs.pool_stays, inputs.endpoint_closes) if 0 < ends < math.inf)
    yield from _canary_moments(inputs)
    if any(group.missing for group in inputs.kept):
        yield _POLL_SECONDS
    if inputs.nodes > 1 and any(not group.scheduled for group in inputs.kept):
        # Other services' gangs change the queue for nodes.
        yield _POLL_SECONDS
    if inputs.rollout.wait_reason and inputs.service.status.gang_released_at:
        yield _POLL_SECONDS
    yield from (step.requeue_after for step in inputs.elastic_steps.values() if step.requeue_after is not None)
    limit = silence_limit(spec.recovery.progress_timeout_seconds)
    for group in inputs.kept:
        decision = inputs.recoveries.get(group.name)
        if decision is not None and decision.wait > 0:
            yield decision.wait
        if not group.target and not group.is_canary and not inputs.is_ready(group):
            returns = seconds_to_return(group, inputs.now)
            if 0 < returns < math.inf:
                yield returns
        due = group.progressed_at + spec.rollout.progress_deadline_seconds - inputs.now
        if (group.target or group.is_canary) and due >= 0 and not inputs.is_ready(group):
            yield due
        times = restart_times(group, spec.recovery, inputs.now)
        if times:
            # One restart fewer counts then: the status shows it, and a group that was given up may be restarted.
            yield times[0] + spec.recovery.window_seconds - inputs.now
        # Silence is no failure of a group that never served, and no news of one whose failure is known.
        # It is no failure of one that sleeps, either.
        watched = group.gang_pods if decision is None and has_served(group) and not group.is_asleep else ()
        for pod in watched:
            if pod.phase == "Running" and not pod.ready and pod.report_age is not None and pod.report_age <= limit:
                yield limit - pod.report_age


def _canary_moments(inputs: StatusInputs) -> Iterator[float]:
    """Yields the end of a step. After it, what keeps the next one away may be a router that does not answer."""
    canary = inputs.canary
    if canary is not None and canary.until is not None:
        yield canary.until - inputs.now if canary.until > inputs.now else _POLL_SECONDS


def _node_moments(inputs: StatusInputs) -> Iterator[float]:
    """Yields the moments of lost and cordoned nodes, which count also while the spec is refused."""
    if any(pod.evicted_by_taint and not pod.lost for pod in inputs.groups.pods):
        yield _POLL_SECONDS
    if any(group.cordoned for group in inputs.kept):
        unscheduled = (pod.created_at for pod in inputs.groups.pods if pod.waiting.startswith("Unschedulable"))
        yield from (left for since in unscheduled if (left := since + SCHEDULING_SECONDS - inputs.now) > 0)
