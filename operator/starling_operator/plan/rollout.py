"""Groups to create and to remove: for scaling, rollouts and node drains. The package's docstring has the formulas."""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from starling_crds.v1alpha1.lifecycle import RolloutSpec
from starling_crds.v1alpha1.spec import InferenceServiceSpec

from starling_operator.plan import names
from starling_operator.plan.gangs import GangRelease
from starling_operator.plan.group import Group, Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGroups:
    """Number and form of the groups that a service is to have.

    replicas       those wanted now, which may be fewer than the spec has (see `scaling`)
    nodes          pods of each group
    broken         a group of the target revision does not come up, so the rollout must not go on
    sees_cordons   the operator may list cordoned nodes, so a single group's eviction can wait for another group
    asleep         they are to sleep, so that no other has to serve in place of one that is evicted
    """

    replicas: int
    nodes: int
    rollout: RolloutSpec
    broken: bool = False
    sees_cordons: bool = False
    asleep: bool = False

    @classmethod
    def from_groups(cls, groups: Groups, spec: InferenceServiceSpec | None, *, sees_cordons: bool) -> "WantedGroups":
        """Takes the groups that exist, while the spec is refused; None: it cannot be read."""
        nodes = max((group.nodes for group in groups.all), default=1)
        return cls(
            replicas=len(groups.all),
            nodes=nodes,
            rollout=spec.rollout if spec is not None else RolloutSpec(),
            sees_cordons=sees_cordons,
        )

    @property
    def min_serving(self) -> int:
        """Ready groups that a rollout leaves. A broken revision replaces none."""
        surge, unavailable = self.rollout.max_surge, self.rollout.max_unavailable
        if self.broken:
            return self.replicas
        # With both 0 no rollout could go on. CEL refuses that, but an object stored by an older release may have it.
        return self.replicas - (unavailable if surge or unavailable else 1)

    def kept_by_evictions(self, replicas: int) -> int:
        """Returns how many of `replicas` evictions have to leave. One may always go, but a single one waits for another."""
        unavailable = self.rollout.max_unavailable
        if replicas == 1 and unavailable == 0 and self.sees_cordons:
            return 1
        return max(0, replicas - max(1, unavailable))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """Groups to create and to remove now.

    create           numbers of new groups of the target revision
    create_canary    numbers of new groups of the revision that is tried
    remove           groups to delete; they drain
    wait_reason      why fewer groups than wanted are created now; ""
    releases_nodes   some groups are removed only to release their nodes for a group of another service
    eviction_surge   groups above `replicas`, which serve before others are evicted
    """

    create: tuple[int, ...] = ()
    create_canary: tuple[int, ...] = ()
    remove: tuple[Group, ...] = ()
    wait_reason: str = ""
    releases_nodes: bool = False
    eviction_surge: int = 0


Ready = Callable[[Group], bool]


def rollout_step(groups: Groups, wanted: WantedGroups, ready: Ready, returning: Ready, name: Callable[[int], str]) -> RolloutStep:
    """Returns the groups to create and to remove, but for those of a canary. `name` names one of the target revision.

    `returning`: whether an old group that is not ready is still waited for.
    """
    groups = groups.without(groups.canary)
    # An old group stays while the target revision is broken: its pods are recreated under its name, or nobody would serve.
    draining = tuple(group for group in groups.all if group.draining and (group.target or not wanted.broken))
    staying = groups.without(draining)
    eviction_surge = _eviction_surge(staying, wanted)
    surplus = _surplus(staying, wanted, ready, eviction_surge)
    remove = draining + surplus + _outdated(staying, wanted, ready, returning, surplus)
    count, wait_reason = _creatable(groups, len(staying.current), wanted, remove, eviction_surge)
    return RolloutStep(
        create=_free_numbers(groups, count, name), remove=remove, wait_reason=wait_reason, eviction_surge=eviction_surge
    )


def with_canary(
    change: RolloutStep, groups: Groups, count: int, nodes: int, ready: Ready, name: Callable[[int], str]
) -> RolloutStep:
    """Adds the canary's groups, on top of all others. `count`: those it is to have; `nodes`: pods of each.

    One whose node is drained goes and is made anew elsewhere: the other revision serves all requests without it.
    """
    going = tuple(group for group in groups.canary if group.draining or group.cordoned)
    staying = [group for group in groups.canary if group not in going]
    surplus = sorted(staying, key=lambda group: _removal_order(group, ready))[: max(0, len(staying) - count)]
    missing = max(0, count - len(staying))
    if nodes > 1:
        waits = bool(change.create) or any(not group.scheduled for group in groups.all if group not in change.remove)
        missing = min(missing, 0 if waits else 1)
    return replace(change, create_canary=_free_numbers(groups, missing, name), remove=(*change.remove, *going, *surplus))


def with_gang_release(change: RolloutStep, groups: Groups, release: GangRelease, nodes: int) -> RolloutStep:
    """Removes groups that release their nodes, or delays new ones. `nodes`: pods of a new group."""
    gone = tuple(group for group in groups.all if group.name in release.groups and group not in change.remove)
    if gone:
        left = replace(change, create=(), create_canary=(), remove=change.remove + gone)
        return replace(left, wait_reason=release.why, releases_nodes=True)
    if release.hold and (change.create or change.create_canary) and nodes > 1:
        return replace(change, create=(), create_canary=(), wait_reason=release.hold)
    return change


def without_refused(change: RolloutStep, refused: Container[str], name: Callable[[int], str]) -> RolloutStep:
    """Leaves out groups whose StatefulSet the API server refuses: they are tried again, but not waited for."""
    return replace(change, create=tuple(number for number in change.create if name(number) not in refused))


def _eviction_surge(groups: Groups, wanted: WantedGroups) -> int:
    """Groups to create before evictions: enough groups must be left when those on cordoned nodes are evicted."""
    if groups.old or wanted.replicas == 0 or wanted.asleep:
        return 0
    missing = sum(group.cordoned for group in groups.current) + wanted.kept_by_evictions(wanted.replicas) - wanted.replicas
    return min(wanted.rollout.max_surge, max(0, missing))


def _surplus(groups: Groups, wanted: WantedGroups, ready: Ready, eviction_surge: int) -> tuple[Group, ...]:
    """Groups of the target revision beyond those wanted."""
    order = sorted(groups.current, key=lambda group: _removal_order(group, ready))
    return tuple(order[: max(0, len(groups.current) - wanted.replicas - eviction_surge)])


def _removal_order(group: Group, ready: Ready) -> tuple[float, ...]:
    """Sort key: groups that are not ready go first, then on cordoned nodes, least busy, youngest, of the highest number."""
    return (ready(group), not group.cordoned, group.open_streams, -group.created_at, -group.index)


def _outdated(
    groups: Groups, wanted: WantedGroups, ready: Ready, returning: Ready, surplus: tuple[Group, ...]
) -> tuple[Group, ...]:
    """Old groups that may go now.

    Groups that are not ready go at once: they may hold the devices that new ones wait for. Those that return stay until enough
    others serve. While the target revision is broken all stay, since they may come back.
    Ready groups go while `min_serving` are left.
    """
    if wanted.replicas == 0:
        return groups.old
    serving = [group for group in groups.old if ready(group)]
    available = len(serving) + sum(ready(group) for group in groups.current if group not in surplus)
    spare = max(0, available - wanted.min_serving)
    waits = not wanted.broken and available < wanted.min_serving
    idle = [group for group in groups.old if not ready(group) and not (waits and returning(group))]
    beyond = max(0, len(groups.old) - wanted.replicas) if wanted.broken else len(idle)
    gone = sorted(idle, key=lambda group: _removal_order(group, ready))[:beyond]
    return (*gone, *sorted(serving, key=lambda group: _removal_order(group, ready))[:spare])


def _creatable(
    groups: Groups, staying: int, wanted: WantedGroups, remove: tuple[Group, ...], eviction_surge: int
) -> tuple[int, str]:
    """Returns how many groups may be created now, and why not more. A group that is being removed still counts.

    `staying`: groups of the target revision that do not drain.
    """
    missing = wanted.replicas + eviction_surge - staying
    if missing <= 0:
        return 0, ""
    if wanted.broken and groups.old:
        return 0, "the new revision fails; no more groups of it are created"
    room = min(missing, wanted.replicas + wanted.rollout.max_surge - len(groups.all))
    if room <= 0:
        return 0, "waits for groups of the old revision to terminate"
    if wanted.nodes == 1:
        return room, ""
    waiting = [group.name for group in groups.all if not group.scheduled and group not in remove]
    if waiting:
        why = "two partly scheduled groups could wait for each other"
        return 0, f"waits until all pods that {waiting[0]} needs are scheduled: {why}"
    return 1, "" if missing == 1 else "groups of several nodes are created one after the other"


def _free_numbers(groups: Groups, count: int, name: Callable[[int], str]) -> tuple[int, ...]:
    """Returns the lowest free numbers. One whose pods still drain is not free: their names are in use."""
    taken = {group.name for group in groups.all} | {pod.group for pod in groups.leaving}
    free = (number for number in range(names.MAX_INDEX + 1) if name(number) not in taken)
    return tuple(number for number, _ in zip(free, range(count), strict=False))
