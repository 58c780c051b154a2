"""Number of groups that a service is to have now. With spec.scaling.idleSeconds it is 0, or all sleep, while nobody asks.

Routers report what clients ask for. One request wakes the service. Before it goes to zero or to sleep, all routers have to say that
there is none: one that says nothing may have some. The status remembers where the service is, and spec.replicas is never written.
"""

from dataclasses import dataclass

from starling_crds.v1alpha1.scaling import ScalingSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import InferenceServiceStatus, ScalingStatus

from starling_operator.plan.observed import Observed, RouterPod, Service
from starling_operator.plan.timestamps import read_time, rfc3339

BELIEVED_SECONDS = 60.0
"""A router's report counts for so long after it answered. A quiet one is asked anew every 45 s."""

_NO_REPLICAS = "spec.replicas is 0"


@dataclass(frozen=True, slots=True)
class Scale:
    """`status` is what is remembered of it, None without idleSeconds; `due`: seconds until `groups` may be another."""

    groups: int
    status: ScalingStatus | None = None
    due: float | None = None


def wanted_scale(observed: Observed, spec: InferenceServiceSpec, *, rolls: bool = False) -> Scale:
    """Returns how many groups there are to be, and whether they sleep.

    While the service `rolls`, groups of its old revision may be all that works. Those of the new one have to show that they do.
    """
    idle_seconds, last = spec.scaling.idle_seconds, observed.service.status.scaling
    if spec.suspend or idle_seconds is None:
        return Scale(0 if spec.suspend else spec.replicas)
    if last is None:
        why = _NO_REPLICAS if spec.replicas == 0 else ""
        last = ScalingStatus(wanted=spec.replicas, message=why, since=rfc3339(observed.now))
    groups = max(1, spec.replicas)
    if last.wanted == 0:
        if last.message == _NO_REPLICAS and spec.replicas:
            last = last.model_copy(update={"message": "no request has come yet"})
        return _at_zero(observed, last, groups)
    if last.sleep_level:
        return _asleep(observed, last, groups, rolls=rolls)
    return _in_use(observed, last, groups, idle_seconds, may_go=not rolls and not _works(observed))


def remembered_scale(service: Service) -> Scale:
    """Returns what counts while the spec is refused: the service stays where it is."""
    spec, last = service.spec, service.status.scaling
    if spec is None or spec.suspend:
        return Scale(0, last)
    return Scale(spec.replicas if last is None else last.wanted, last)


def start_seconds_left(last: ScalingStatus | None, now: float) -> float | None:
    """Returns the seconds until a group serves, if that takes as long as the last time; None: unknown, or it takes longer."""
    if last is None or not last.wanted or last.started_at or not last.start_seconds:
        return None
    left = read_time(last.since) + last.start_seconds - now
    return left if left > 0 else None


def _at_zero(observed: Observed, last: ScalingStatus, groups: int) -> Scale:
    return _woken(observed, last, groups) if _is_asked(observed) else Scale(0, last)


def _asleep(observed: Observed, last: ScalingStatus, groups: int, *, rolls: bool) -> Scale:
    if rolls or _is_asked(observed):
        return _woken(observed, last, groups)
    level = _scaling(observed).standby_level
    if not level:
        return Scale(0, last.model_copy(update={"wanted": 0, "sleep_level": 0, "since": rfc3339(observed.now)}))
    return Scale(groups, last.model_copy(update={"wanted": groups, "sleep_level": level}))


def _is_asked(observed: Observed) -> bool:
    """Says whether there is a request: it waits, a group that still drains has it, or it has just ended."""
    believed = (pod.report for pod in observed.routers if is_believed(pod))
    return any(report is not None and (report.open or report.quiet_seconds is None) for report in believed)


def _woken(observed: Observed, last: ScalingStatus, groups: int) -> Scale:
    since, message = rfc3339(observed.now), _goes_after(observed)
    return Scale(groups, ScalingStatus(wanted=groups, message=message, since=since, start_seconds=last.start_seconds))


def _in_use(observed: Observed, last: ScalingStatus, groups: int, idle_seconds: int, *, may_go: bool) -> Scale:
    stays = last.model_copy(update={"wanted": groups, "message": _goes_after(observed)})
    since = serves_since(observed.service.status)
    if since is None:
        # A service that does not come up stays, for whoever looks into it.
        return Scale(groups, stays)
    stays = _with_start(stays, since)
    silent = next((pod.name for pod in observed.routers if pod.is_running and not pod.is_going and not is_believed(pod)), None)
    if silent is not None:
        message = f"all groups stay: router {silent} does not say whether there are requests"
        return Scale(groups, stays.model_copy(update={"message": message}))
    quiet = _quiet_seconds(observed)
    if quiet is None or not may_go:
        return Scale(groups, stays)
    left = idle_seconds - min(quiet, observed.now - since)
    if left > 0:
        return Scale(groups, stays, due=left)
    level = _scaling(observed).standby_level
    wanted = groups if level else 0
    idle = {"message": f"no request for {idle_seconds} s", "since": rfc3339(observed.now), "sleep_level": level}
    return Scale(wanted, stays.model_copy(update={"wanted": wanted} | idle))


def _works(observed: Observed) -> bool:
    """Says whether groups have work that no request waits for, such as responses in the background."""
    return any(pod.report is not None and pod.report.open_streams for pod in observed.pods)


def _quiet_seconds(observed: Observed) -> float | None:
    """Returns the seconds since the last request ended; None: some router has requests, or there is none to ask."""
    if any(pod.is_going and pod.report and is_believed(pod) and pod.report.quiet_seconds is None for pod in observed.routers):
        return None
    found = [pod for pod in observed.routers if pod.is_running and not pod.is_going]
    quiet = [pod.report_age + pod.report.quiet_seconds for pod in found if pod.report and pod.report.quiet_seconds is not None]
    return min(quiet) if found and len(quiet) == len(found) else None


def is_believed(pod: RouterPod) -> bool:
    """True if it has a report that is not too old."""
    return pod.report is not None and pod.report_age <= BELIEVED_SECONDS


def serves_since(status: InferenceServiceStatus) -> float | None:
    """Returns since when a group serves, as the last status has it: who waited for that has as much time as others."""
    found = (each for each in status.conditions if each.type == "Available" and each.status == "True")
    return next((read_time(each.last_transition_time) for each in found), None)


def _with_start(last: ScalingStatus, serves_since: float) -> ScalingStatus:
    """Notes how long the start took, once."""
    if last.started_at:
        return last
    took = round(serves_since - read_time(last.since))
    known = max(1, took) if took >= 0 else last.start_seconds
    return last.model_copy(update={"started_at": rfc3339(serves_since), "start_seconds": known})


def _goes_after(observed: Observed) -> str:
    scaling = _scaling(observed)
    return f"all groups {'sleep' if scaling.standby_level else 'go'} after {scaling.idle_seconds} s without a request"


def _scaling(observed: Observed) -> ScalingSpec:
    assert observed.service.spec is not None
    return observed.service.spec.scaling
