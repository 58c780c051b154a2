"""Groups that wait for nodes, over all services: two that each hold what the other waits for would wait for ever.

Kubernetes places pods one by one. So who is half placed for too long lets go of its nodes, the later one first; who is first has
twice the time, and lets go then only if others wait as well. Whoever let go begins anew when nobody else is half placed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starling_operator.plan.observed import Gang, Observed, Pod

_TURNS = 2.0


@dataclass(frozen=True, slots=True)
class GangRelease:
    """The own groups that let go now, and why; `hold`: why no group of several pods may be begun now, or ""."""

    groups: frozenset[str] = frozenset()
    why: str = ""
    hold: str = ""


def waiting_gangs(service: tuple[str, str], pods: Iterable[Pod]) -> list[Gang]:
    """The service's groups of several pods that serve nobody and have pods without a node."""
    groups: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.deleted_at is None and not pod.lost:
            groups.setdefault(pod.group, []).append(pod)
    return [
        Gang(service, name, since=max(pod.created_at for pod in its), held=sum(pod.scheduled for pod in its))
        for name, its in sorted(groups.items())
        if len(its) > 1 and not any(pod.ready for pod in its) and not all(pod.scheduled for pod in its)
    ]


def release(observed: Observed, released_at: float) -> GangRelease:
    """What the queue asks of this service. `released_at`: when it let go last, in seconds since the epoch; 0: never."""
    service, now, patience = observed.service, observed.now, observed.settings.gang_patience
    own = [gang for gang in observed.gangs if gang.service == (service.namespace, service.name)]
    others = [gang for gang in observed.gangs if gang not in own]
    gone = frozenset(gang.group for gang in own if _gives_up(gang, others, now, patience))
    first = min((other for other in others if other.held), key=_order, default=None)
    if gone:
        return GangRelease(gone, f"{min(gone)} lets go of its nodes after {patience:.0f} s: {_named(others)} waits for nodes too")
    if first is not None and now - released_at < _TURNS * patience:
        return GangRelease(hold=f"waits for its turn: {_named([first])} has some of its nodes, and comes first")
    return GangRelease()


def _gives_up(gang: Gang, others: Sequence[Gang], now: float, patience: float) -> bool:
    age = now - gang.since
    later = any(other.held and _order(other) < _order(gang) for other in others)
    return gang.held > 0 and bool(others) and age >= (patience if later else _TURNS * patience)


def _order(gang: Gang) -> tuple[float, tuple[str, str]]:
    return gang.since, gang.service


def _named(gangs: Sequence[Gang]) -> str:
    first = min(gangs, key=_order)
    return f"{first.group} of {'/'.join(first.service)}"
