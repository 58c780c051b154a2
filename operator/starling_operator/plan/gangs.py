"""Groups of several pods that wait for nodes, over all services. Two that each hold nodes for the other would wait for ever.

Kubernetes schedules pods one by one. So a group of which only some pods are scheduled releases their nodes after
`gang_patience` seconds, if other groups wait as well. The earliest such group has twice the time. A group that released its nodes
is recreated when no other service's group holds some, or after twice the time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starling_operator.plan.observed import Gang, Observed, Pod

_EARLIEST_PATIENCE = 2.0
"""Times `gang_patience` that the earliest waiting group has, and that a group waits which released its nodes."""


@dataclass(frozen=True, slots=True)
class GangRelease:
    """`groups` of this service that release their nodes now, and `why`. `hold`: why no new group may be created now, or ""."""

    groups: frozenset[str] = frozenset()
    why: str = ""
    hold: str = ""


def waiting_gangs(service: tuple[str, str], pods: Iterable[Pod]) -> list[Gang]:
    """Returns the service's groups of several pods that do not serve and have pods without a node."""
    groups: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.deleted_at is None and not pod.lost:
            groups.setdefault(pod.group, []).append(pod)
    return [
        Gang(service, name, since=max(pod.created_at for pod in its), scheduled=sum(pod.scheduled for pod in its))
        for name, its in sorted(groups.items())
        if len(its) > 1 and not any(pod.ready for pod in its) and not all(pod.scheduled for pod in its)
    ]


def gang_release(observed: Observed, released_at: float) -> GangRelease:
    """Returns the groups that release their nodes. `released_at`: when one last did, in seconds since the epoch; 0: never."""
    service, now, patience = observed.service, observed.now, observed.settings.gang_patience
    own = [gang for gang in observed.gangs if gang.service == (service.namespace, service.name)]
    others = [gang for gang in observed.gangs if gang not in own]
    gone = frozenset(gang.group for gang in own if _gives_up(gang, others, now, patience))
    first = min((other for other in others if other.scheduled), key=_order, default=None)
    if gone:
        return GangRelease(gone, f"{min(gone)} releases its nodes after {patience:.0f} s: {_named(others)} waits for nodes too")
    if first is not None and now - released_at < _EARLIEST_PATIENCE * patience:
        return GangRelease(hold=f"waits for its turn: {_named([first])} has some of its nodes, and comes first")
    return GangRelease()


def _gives_up(gang: Gang, others: Sequence[Gang], now: float, patience: float) -> bool:
    age = now - gang.since
    later = any(other.scheduled and _order(other) < _order(gang) for other in others)
    return gang.scheduled > 0 and bool(others) and age >= (patience if later else _EARLIEST_PATIENCE * patience)


def _order(gang: Gang) -> tuple[float, tuple[str, str]]:
    return gang.since, gang.service


def _named(gangs: Sequence[Gang]) -> str:
    first = min(gangs, key=_order)
    return f"{first.group} of {'/'.join(first.service)}"
