"""A canary: a new revision is tried on a part of the requests, next to all groups of the one that serves. See the formulas.

The status holds its phase and step. A phase is stored before anything is done for it, so an operator that dies forgets none: the
next one still removes the groups of a canary that was rolled back, and never tries that revision again.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic_core import to_json
from starling_crds.v1alpha1.lifecycle import CanarySpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec
from starling_crds.v1alpha1.status import CanaryStatus

from starling_operator.plan.canary_gates import Judgement, judge, unheard
from starling_operator.plan.canary_notice import compares_tokens, is_left
from starling_operator.plan.failure import find_failure, has_served, restart_count
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.observed import Observed, Service
from starling_operator.plan.revision import Revision, Revisions
from starling_operator.plan.router import leads_to_routers
from starling_operator.plan.timestamps import read_time, rfc3339


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A canary as the last status has it, or one that begins.

    tried, stable   revisions: the one of the spec, and the one that serves
    """

    spec: CanarySpec
    paused: bool
    status: CanaryStatus
    tried: Revision
    stable: Revision

    @property
    def aim(self) -> Revision:
        """The revision whose groups the service is to have, but for the canary's own: the stable one until the other passed."""
        return self.tried if self.status.phase == "passed" else self.stable

    @property
    def is_tried(self) -> bool:
        return self.status.phase == "trying"

    @property
    def step(self) -> int:
        """The step that it is at. An edit may leave fewer than there were."""
        return min(self.status.step, len(self.spec.steps))

    @property
    def until(self) -> float:
        """Returns when its step may end, in seconds since the epoch."""
        since = read_time(self.status.since)
        return since + self.spec.steps[self.step - 1].seconds if self.step else since

    def groups(self, step: int, replicas: int) -> int:
        """Groups that the canary is to have at a step, from 1."""
        return max(1, math.ceil(replicas * self.spec.steps[min(step, len(self.spec.steps)) - 1].weight / 100)) if replicas else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryDecision:
    """The canary after a decision.

    status        to be written
    groups        groups that it is to have
    wait_reason   why its step does not end; "" where only its time has to pass
    until         when its step may end, in seconds since the epoch; None: when something changes
    """

    status: CanaryStatus
    groups: int = 0
    wait_reason: str = ""
    until: float | None = None


def read_canary(service: Service, spec: InferenceServiceSpec, revisions: Revisions, now: float) -> Canary | None:
    """Returns None where the spec's revision replaces others as without a canary, or is all that there is."""
    wanted, target = spec.rollout.canary, revisions.target
    status = _known(service, wanted, target) or _begun(service, target, now) if wanted is not None else None
    stable = revisions.find(status.stable) if status is not None else None
    if wanted is None or status is None or stable is None or stable.id == target.id or stable.layout.elastic is not None:
        return None
    return Canary(spec=wanted, paused=spec.rollout.pause, status=status, tried=target, stable=stable)


def canary_decision(
    canary: Canary, observed: Observed, groups: Groups, replicas: int, unready: Mapping[str, str], broken: Mapping[str, str]
) -> CanaryDecision:
    """Returns the next step. `unready` and `broken` have reasons by a group's name."""
    last = canary.status
    if not canary.is_tried:
        return CanaryDecision(status=last)
    if replicas == 0:
        # With groups to compare it with, it begins anew.
        return CanaryDecision(status=_at(canary, 0, observed.now) if last.step else last)
    judged = _judged(canary, observed)
    why = _not_coming_up(groups, unready, broken, observed) or judged.failed or _stuck_for_long(canary, judged.stuck, observed)
    if why:
        return CanaryDecision(status=_rolled_back(canary, why), groups=len(groups.canary))
    return _next_step(canary, observed, groups, replicas, unready, judged.waits)


def kept_canary(last: CanaryStatus | None) -> CanaryDecision | None:
    """Keeps a canary while the spec is refused. Nobody judges it then, so no requests go to it."""
    if last is None or last.phase == "takenBack":
        return None
    return CanaryDecision(status=last.model_copy(update={"weight": 0}) if last.phase == "trying" else last)


def taken_back(observed: Observed, target: Revision) -> CanaryStatus | None:
    """Returns what is left of a canary from which the spec went back: its pods are to get no requests while they drain."""
    last = observed.service.status.canary
    if last is None or last.phase == "passed" or last.stable != target.id or not is_left(observed, last.revision):
        return None
    return last.model_copy(update={"phase": "takenBack", "weight": 0, "message": ""})


def canary_hash(spec: CanarySpec) -> str:
    """Digest of spec.rollout.canary without defaults: an edit of it is another try.

    Digests are in statuses. So `key` is left out and `session` is not: stickyBy's default was `key` when the first were stored.
    """
    said = {**spec.model_dump(exclude_defaults=True), "sticky_by": spec.sticky_by}
    if spec.sticky_by == "key":
        del said["sticky_by"]
    in_order = {name: said[name] for name in CanarySpec.model_fields if name in said}
    return hashlib.sha256(to_json(in_order)).hexdigest()[:16]


def _known(service: Service, wanted: CanarySpec, target: Revision) -> CanaryStatus | None:
    """Returns what the status has of this revision: it goes on, or is not tried again."""
    last = service.status.canary
    if last is None or last.revision != target.id or last.phase == "takenBack" or _is_over(last, service):
        return None
    return None if last.phase == "rolledBack" and last.spec_hash != canary_hash(wanted) else last


def _is_over(last: CanaryStatus, service: Service) -> bool:
    return last.phase == "passed" and service.status.revision.current == last.revision


def _begun(service: Service, target: Revision, now: float) -> CanaryStatus | None:
    """Begins a canary where an edit made another revision, or asks for another try, and there are groups that have served."""
    status, last = service.status, service.status.canary
    again = last is not None and last.revision == target.id and last.phase == "rolledBack"
    if target.id == status.revision.current or (not again and status.revision.target in ("", target.id)):
        return None
    stable = last.revision if last is not None and last.phase == "passed" else status.revision.current
    if not any(group.revision == stable and group.served for group in status.groups):
        return None
    return CanaryStatus(revision=target.id, stable=stable, since=rfc3339(now))


def _next_step(
    canary: Canary, observed: Observed, groups: Groups, replicas: int, unready: Mapping[str, str], waits: str
) -> CanaryDecision:
    """Stays at the step, brings up the groups of the next one, takes it once they serve, or ends the canary after the last."""
    step, status, now, until = canary.step, canary.status, observed.now, canary.until
    kept = max(canary.groups(step, replicas) if step else 0, min(len(groups.canary), canary.groups(step + 1, replicas)))
    if not step and not leads_to_routers(observed):
        return CanaryDecision(status=status, groups=kept, wait_reason="waits for a router: clients are still led to agents")
    if not step and (silent := unheard(observed.routers, status)):
        # A router that does not know of the canary would share requests by load as soon as its groups serve.
        return CanaryDecision(status=status, groups=kept, wait_reason=silent, until=until)
    if step:
        status = _weighted(canary, sum(not unready[group.name] for group in groups.canary) >= canary.groups(step, replicas))
    if step and (canary.paused or until > now or waits):
        wait_reason = "spec.rollout.pause holds it" if canary.paused else "" if until > now else waits
        return CanaryDecision(status=status, groups=kept, wait_reason=wait_reason, until=None if canary.paused else until)
    wanted = canary.groups(step + 1, replicas)
    coming = next((unready[group.name] for group in groups.canary if unready[group.name]), "")
    if sum(not unready[group.name] for group in groups.canary) < wanted:
        return CanaryDecision(status=status, groups=wanted, wait_reason=coming or "groups of the next step are created")
    return CanaryDecision(status=_at(canary, step + 1, now), groups=wanted)


def _at(canary: Canary, step: int, now: float) -> CanaryStatus:
    """Returns the status at the beginning of a step; after the last one it has passed."""
    if step > len(canary.spec.steps):
        return canary.status.model_copy(update={"phase": "passed", "since": rfc3339(now)})
    weight = canary.spec.steps[step - 1].weight if step else 0
    return canary.status.model_copy(update={"step": step, "weight": weight, "since": rfc3339(now)})


def _weighted(canary: Canary, all_serve: bool) -> CanaryStatus:
    """Returns the status with its step's weight, which an edit may have changed: a higher one counts once all groups serve."""
    weight = canary.spec.steps[canary.step - 1].weight
    return canary.status.model_copy(update={"weight": weight if all_serve else min(weight, canary.status.weight)})


def _judged(canary: Canary, observed: Observed) -> Judgement:
    """Judges the step. Before the first one, it has no requests."""
    if not canary.step:
        return Judgement()
    return judge(
        observed.routers,
        canary.status,
        canary.spec.steps[canary.step - 1],
        tokens=compares_tokens(observed, canary.spec, canary.stable, canary.tried),
        must_compare=canary.spec.compare == "tokens",
        is_over=observed.now >= canary.until,
    )


def _not_coming_up(groups: Groups, unready: Mapping[str, str], broken: Mapping[str, str], observed: Observed) -> str:
    """Returns why one of its groups does not come up: by its progress deadline, or at once where trying again cannot help."""
    assert observed.service.spec is not None
    limit = observed.service.spec.rollout.progress_deadline_seconds
    for group in groups.canary:
        if broken.get(group.name) and not has_served(group) and not _first_restart(group):
            return broken[group.name]
        if group.deadline_exceeded and unready[group.name]:
            return f"{unready[group.name]}; {group.name} made no progress for over {limit} s"
    return ""


def _stuck_for_long(canary: Canary, stuck: str, observed: Observed) -> str:
    """Returns what has kept the step for the progress deadline beyond its time. A pause holds a canary for as long as it likes."""
    assert observed.service.spec is not None
    limit = observed.service.spec.rollout.progress_deadline_seconds
    if not stuck or canary.paused or observed.now < canary.until + limit:
        return ""
    return f"{stuck}; its step made no progress for over {limit} s"


def _first_restart(group: Group) -> bool:
    """True if a restart may help and none was tried yet."""
    return find_failure(group, math.inf) is not None and restart_count(group) == 0


def _rolled_back(canary: Canary, why: str) -> CanaryStatus:
    at = f"at step {canary.step} of {len(canary.spec.steps)}" if canary.step else "before its first step"
    text = f"revision {canary.tried.id} was rolled back {at}: {why}"
    changes = {"phase": "rolledBack", "weight": 0, "message": text, "spec_hash": canary_hash(canary.spec)}
    return canary.status.model_copy(update=changes)
