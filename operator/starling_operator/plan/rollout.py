"""Which groups to make and which to remove: scaling, the replacement of old revisions group by group, and of groups whose node is
emptied.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from starling_crds.v1alpha1.lifecycle import RolloutSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.gangs import GangRelease
from starling_operator.plan.group import Group, Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGroups:
    """wanted groups of `nodes` pods each.

    broken         groups of the target revision fail, so that the rollout must not go on
    sees_cordons   it is known which nodes are about to be emptied, so that an only group's eviction can wait for another group
    """

    replicas: int
    nodes: int
    rollout: RolloutSpec
    broken: bool = False
    sees_cordons: bool = False

    @classmethod
    def of(cls, spec: InferenceServiceSpec, nodes: int, *, broken: bool, sees_cordons: bool) -> "WantedGroups":
        """A suspended service wants none."""
        replicas = 0 if spec.suspend else spec.replicas
        return cls(replicas=replicas, nodes=nodes, rollout=spec.rollout, broken=broken, sees_cordons=sees_cordons)

    @classmethod
    def as_it_is(cls, groups: Groups, spec: InferenceServiceSpec | None, *, sees_cordons: bool) -> "WantedGroups":
        """What is there, while the spec cannot be carried out, or (None) not be read."""
        nodes = max((group.nodes for group in groups.all), default=1)
        return cls(
            replicas=len(groups.all),
            nodes=nodes,
            rollout=spec.rollout if spec is not None else RolloutSpec(),
            sees_cordons=sees_cordons,
        )

    @property
    def floor(self) -> int:
        """Groups that stay available while old ones are replaced; a broken revision replaces none."""
        surge, unavailable = self.rollout.max_surge, self.rollout.max_unavailable
        if self.broken:
            return self.replicas
        # Both 0 leaves no way to move. CEL refuses it, but an object stored by an older release may have it.
        return self.replicas - (unavailable if surge or unavailable else 1)

    def left_by_evictions(self, replicas: int) -> int:
        """How many of so many evictions have to leave. One may always go, but for an only one that another one can precede."""
        unavailable = self.rollout.max_unavailable
        if replicas == 1 and unavailable == 0 and self.sees_cordons:
            return 1
        return max(0, replicas - max(1, unavailable))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """create: numbers of new groups of the target revision; waits: why fewer than wanted are made now.

    released   some of those that go only let go of their nodes, for another service's group
    ahead   groups above those asked for, which come before others are taken away
    """

    create: tuple[int, ...] = ()
    remove: tuple[Group, ...] = ()
    waits: str = ""
    released: bool = False
    ahead: int = 0


Ready = Callable[[Group], bool]


def change_groups(groups: Groups, wanted: WantedGroups, ready: Ready, name: Callable[[int], str]) -> RolloutStep:
    """`ready` says whether a group serves; `name` names a group of the target revision."""
    # An old group stays while the new revision is broken: it comes back in its own place, or nobody would serve.
    going = tuple(group for group in groups.all if group.going and (group.target or not wanted.broken))
    staying = groups.without(going)
    ahead = _ahead(staying, wanted)
    surplus = _surplus(staying, wanted, ready, ahead)
    remove = going + surplus + _outdated(staying, wanted, ready, surplus)
    count, waits = _room(groups, len(staying.current), wanted, remove, ahead)
    return RolloutStep(create=_free_numbers(groups, count, name), remove=remove, waits=waits, ahead=ahead)


def let_go(change: RolloutStep, groups: Groups, asked: GangRelease, nodes: int) -> RolloutStep:
    """With what the queue of all services' groups asks; `nodes` are the pods of a new group."""
    gone = tuple(group for group in groups.all if group.name in asked.groups and group not in change.remove)
    if gone:
        return replace(change, create=(), remove=change.remove + gone, waits=asked.why, released=True)
    if asked.hold and change.create and nodes > 1:
        return replace(change, create=(), waits=asked.hold)
    return change


def without_refused(change: RolloutStep, refused: Container[str], name: Callable[[int], str]) -> RolloutStep:
    """What comes of it: groups whose StatefulSet the API server refuses are tried again, and not waited for."""
    return replace(change, create=tuple(number for number in change.create if name(number) not in refused))


def _ahead(groups: Groups, wanted: WantedGroups) -> int:
    """Where too few would be left without the groups on nodes that are about to be emptied, others come first."""
    if groups.old or wanted.replicas == 0:
        return 0
    missing = sum(group.cordoned for group in groups.current) + wanted.left_by_evictions(wanted.replicas) - wanted.replicas
    return min(wanted.rollout.max_surge, max(0, missing))


def _surplus(groups: Groups, wanted: WantedGroups, ready: Ready, ahead: int) -> tuple[Group, ...]:
    """Groups of the target revision beyond those wanted."""
    order = sorted(groups.current, key=lambda group: _missed(group, ready))
    return tuple(order[: max(0, len(groups.current) - wanted.replicas - ahead)])


def _missed(group: Group, ready: Ready) -> tuple[float, ...]:
    """First those go that serve nobody, that have to go anyway, that are the least busy, the youngest; then the highest number."""
    return (ready(group), not group.cordoned, group.open_streams, -group.born, -group.index)


def _outdated(groups: Groups, wanted: WantedGroups, ready: Ready, surplus: tuple[Group, ...]) -> tuple[Group, ...]:
    """Old groups that may go now.

    Those that serve nobody go at once: they may hold the very devices that the new ones wait for. But not while the new
    revision is broken, for they may come back. Those that serve go as far as the floor allows.
    """
    if wanted.replicas == 0:
        return groups.old
    serving = [group for group in groups.old if ready(group)]
    idle = [group for group in groups.old if not ready(group)]
    available = len(serving) + sum(ready(group) for group in groups.current if group not in surplus)
    spare = max(0, available - wanted.floor)
    beyond = max(0, len(groups.old) - wanted.replicas) if wanted.broken else len(idle)
    gone = sorted(idle, key=lambda group: _missed(group, ready))[:beyond]
    return (*gone, *sorted(serving, key=lambda group: _missed(group, ready))[:spare])


def _room(groups: Groups, staying: int, wanted: WantedGroups, remove: tuple[Group, ...], ahead: int) -> tuple[int, str]:
    """How many groups may be made now. A group that is being removed still counts: it goes after the new ones come.

    `staying`: groups of the target revision of which no pod is taken away.
    """
    missing = wanted.replicas + ahead - staying
    if missing <= 0:
        return 0, ""
    if wanted.broken and groups.old:
        return 0, "the new revision fails; no more groups of it are made"
    room = min(missing, wanted.replicas + wanted.rollout.max_surge - len(groups.all))
    if room <= 0:
        return 0, "waits for groups of the old revision to go"
    if wanted.nodes == 1:
        return room, ""
    half = [group.name for group in groups.all if not group.placed and group not in remove]
    if half:
        return 0, f"waits until all pods of {half[0]} have a node: two half-placed groups could wait for each other"
    return 1, "" if missing == 1 else "groups of several nodes are made one after the other"


def _free_numbers(groups: Groups, count: int, name: Callable[[int], str]) -> tuple[int, ...]:
    """The lowest that are free. A name whose pods still drain is not: the new group's pods could not be made before they end."""
    taken = {group.name for group in groups.all} | {pod.group for pod in groups.leaving}
    free = (number for number in range(names.MAX_INDEX + 1) if name(number) not in taken)
    return tuple(number for number, _ in zip(free, range(count), strict=False))
