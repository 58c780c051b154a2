"""Which groups to make and which to remove: scaling, and the replacement of old revisions group by group."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from starling_crds.v1alpha1.lifecycle import RolloutSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.gangs import Release
from starling_operator.plan.group import Group, Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """wanted groups of `nodes` pods each; `broken`: groups of the target revision fail, so that the rollout must not go on."""

    replicas: int
    nodes: int
    rollout: RolloutSpec
    broken: bool = False

    @classmethod
    def of(cls, spec: InferenceServiceSpec, nodes: int, *, broken: bool) -> "Wanted":
        """A suspended service wants none."""
        return cls(replicas=0 if spec.suspend else spec.replicas, nodes=nodes, rollout=spec.rollout, broken=broken)

    @property
    def floor(self) -> int:
        """Groups that stay available while old ones are replaced; a broken revision replaces none."""
        surge, unavailable = self.rollout.max_surge, self.rollout.max_unavailable
        if self.broken:
            return self.replicas
        # Both 0 leaves no way to move. CEL refuses it, but an object stored by an older release may have it.
        return self.replicas - (unavailable if surge or unavailable else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """create: numbers of new groups of the target revision; waits: why fewer than wanted are made now.

    released   some of those that go only let go of their nodes, for another service's group
    """

    create: tuple[int, ...] = ()
    remove: tuple[Group, ...] = ()
    waits: str = ""
    released: bool = False


Ready = Callable[[Group], bool]


def change_groups(groups: Groups, wanted: Wanted, ready: Ready, name: Callable[[int], str]) -> Change:
    """`ready` says whether a group serves; `name` names a group of the target revision."""
    surplus = _surplus(groups, wanted, ready)
    remove = surplus + _outdated(groups, wanted, ready, surplus)
    count, waits = _room(groups, wanted, remove)
    return Change(create=_free_numbers(groups, count, name), remove=remove, waits=waits)


def let_go(change: Change, groups: Groups, asked: Release, nodes: int) -> Change:
    """With what the queue of all services' groups asks; `nodes` are the pods of a new group."""
    gone = tuple(group for group in groups.all if group.name in asked.groups and group not in change.remove)
    if gone:
        return replace(change, create=(), remove=change.remove + gone, waits=asked.why, released=True)
    if asked.hold and change.create and nodes > 1:
        return replace(change, create=(), waits=asked.hold)
    return change


def _surplus(groups: Groups, wanted: Wanted, ready: Ready) -> tuple[Group, ...]:
    """Groups of the target revision beyond those wanted: first those that serve nobody, then the highest number."""
    order = sorted(groups.current, key=lambda group: (ready(group), -group.index))
    return tuple(order[: max(0, len(groups.current) - wanted.replicas)])


def _outdated(groups: Groups, wanted: Wanted, ready: Ready, surplus: tuple[Group, ...]) -> tuple[Group, ...]:
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
    gone = sorted(idle, key=lambda group: -group.index)[:beyond]
    return (*gone, *sorted(serving, key=lambda group: -group.index)[:spare])


def _room(groups: Groups, wanted: Wanted, remove: tuple[Group, ...]) -> tuple[int, str]:
    """How many groups may be made now. A group that is being removed still counts: it goes after the new ones come."""
    missing = wanted.replicas - len(groups.current)
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
