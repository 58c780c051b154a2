"""Groups that are made and removed, one decision at a time.

Groups are drawn as letters in the order of their numbers: R serves, s has a node and starts, p waits for a node.
"""

from collections.abc import Container

import pytest
from starling_crds.v1alpha1.lifecycle import RolloutSpec
from starling_operator.plan import names
from starling_operator.plan.group import Group, Groups
from starling_operator.plan.observed import Pod
from starling_operator.plan.rollout import RolloutStep, WantedGroups, rollout_step

from tests.operator.plan.building import NOW, make_group, make_pod, make_report, pending
from tests.operator.plan.world import settled

NEW, OLD = "nnnnnnn", "ooooooo"


def draw(letters: str, revision: str, nodes: int = 1) -> tuple[Group, ...]:
    return tuple(
        _drawn(letter, names.group("chat", revision, index), nodes, target=revision == NEW)
        for index, letter in enumerate(letters)
        if letter != "-"
    )


def _drawn(letter: str, name: str, nodes: int, *, target: bool) -> Group:
    fields = {"R": {}, "s": {"ready": False}, "p": pending()}[letter]
    return make_group(name, [make_pod(name, number, **fields) for number in range(nodes)], target=target)


def change(
    old: str,
    new: str,
    replicas: int,
    *,
    surge: int = 1,
    unavailable: int = 0,
    nodes: int = 1,
    broken: bool = False,
    leaving: tuple[Pod, ...] = (),
    returning: Container[str] = (),
) -> RolloutStep:
    groups = Groups(current=draw(new, NEW, nodes), old=draw(old, OLD, nodes), leaving=leaving, orphans=())
    rollout = RolloutSpec(max_surge=surge, max_unavailable=unavailable)
    wanted = WantedGroups(replicas=replicas, nodes=nodes, rollout=rollout, broken=broken)
    return rollout_step(
        groups,
        wanted,
        ready=lambda group: group.available,
        returning=lambda group: group.name in returning,
        name=lambda index: names.group("chat", NEW, index),
    )


def shown(decided: RolloutStep) -> tuple[list[int], list[str]]:
    """Numbers that are made, and groups that go as o1, n2."""
    return list(decided.create), sorted(f"{group.revision[0]}{group.index}" for group in decided.remove)


@pytest.mark.parametrize(
    ("new", "replicas", "create", "remove"),
    [
        ("", 0, [], []),
        ("", 1, [0], []),
        ("", 3, [0, 1, 2], []),
        ("R", 1, [], []),
        ("s", 1, [], []),
        ("p", 1, [], []),
        ("R", 3, [1, 2], []),
        ("s", 3, [1, 2], []),
        ("p", 3, [1, 2], []),
        ("-R", 2, [0], []),
        ("R-R", 3, [1], []),
        ("--RR", 4, [0, 1], []),
        ("-RR", 2, [], []),
        ("RR", 1, [], ["n1"]),
        ("RRR", 1, [], ["n1", "n2"]),
        ("RRR", 0, [], ["n0", "n1", "n2"]),
        ("sss", 0, [], ["n0", "n1", "n2"]),
        ("sR", 1, [], ["n0"]),
        ("Rs", 1, [], ["n1"]),
        ("sRR", 2, [], ["n0"]),
        ("sRs", 2, [], ["n2"]),
        ("RsR", 2, [], ["n1"]),
        ("pRR", 1, [], ["n0", "n2"]),
        ("ssR", 1, [], ["n0", "n1"]),
        ("RRRRR", 2, [], ["n2", "n3", "n4"]),
    ],
)
def test_scaling_at_one_revision(new: str, replicas: int, create: list[int], remove: list[str]) -> None:
    assert shown(change("", new, replicas)) == (create, remove)


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        # streams that are open in each group, and its age in seconds
        ([(0, 9), (4, 9), (2, 9)], ["n0"]),
        ([(5, 9), (4, 9), (6, 9)], ["n1"]),
        ([(5, 9), (5, 3), (5, 6)], ["n1"]),
        ([(5, 3), (5, 3), (5, 3)], ["n2"]),
    ],
)
def test_scaling_down_takes_the_least_busy_group_then_the_youngest(fields: list[tuple[int, int]], gone: list[str]) -> None:
    pods = [
        make_pod(f"chat-{NEW}-{index}", created_at=NOW - age, report=make_report(open_streams=streams))
        for index, (streams, age) in enumerate(fields)
    ]
    groups = Groups(current=tuple(make_group(pod.group, [pod]) for pod in pods), old=(), leaving=(), orphans=())
    wanted = WantedGroups(replicas=2, nodes=1, rollout=RolloutSpec())
    assert shown(rollout_step(groups, wanted, lambda _: True, lambda _: False, str)) == ([], gone)


@pytest.mark.parametrize(
    ("new", "replicas", "create"),
    [
        ("", 1, [0]),
        ("", 3, [0]),
        ("p", 3, []),
        ("s", 3, [1]),
        ("R", 3, [1]),
        ("Rp", 3, []),
        ("pR", 3, []),
        ("Rs", 3, [2]),
        ("-R", 2, [0]),
    ],
)
def test_groups_of_several_nodes_are_made_when_the_last_is_placed(new: str, replicas: int, create: list[int]) -> None:
    decided = change("", new, replicas, nodes=2)
    assert shown(decided) == (create, [])
    missing = replicas - len(new.replace("-", ""))
    assert bool(decided.wait_reason) == (len(create) < missing), "what is not made now is explained"


@pytest.mark.parametrize(
    ("old", "new", "replicas", "surge", "unavailable", "create", "remove"),
    [
        # one group, one above: the new one first
        ("R", "", 1, 1, 0, [0], []),
        ("R", "p", 1, 1, 0, [], []),
        ("R", "s", 1, 1, 0, [], []),
        ("R", "R", 1, 1, 0, [], ["o0"]),
        # one group, none above: the old one first
        ("R", "", 1, 0, 1, [], ["o0"]),
        ("", "", 1, 0, 1, [0], []),
        # neither allowed: one may be missing
        ("R", "", 1, 0, 0, [], ["o0"]),
        ("RRR", "", 3, 0, 0, [], ["o2"]),
        ("RR", "", 3, 0, 0, [0], []),
        # three groups, one above
        ("RRR", "", 3, 1, 0, [0], []),
        ("RRR", "s", 3, 1, 0, [], []),
        ("RRR", "R", 3, 1, 0, [], ["o2"]),
        ("RR", "R", 3, 1, 0, [1], []),
        ("RR", "Rs", 3, 1, 0, [], []),
        ("RR", "RR", 3, 1, 0, [], ["o1"]),
        ("R", "RRs", 3, 1, 0, [], []),
        ("R", "RRR", 3, 1, 0, [], ["o0"]),
        # three groups, one may be missing
        ("RRR", "", 3, 0, 1, [], ["o2"]),
        ("RR", "", 3, 0, 1, [0], []),
        ("RR", "s", 3, 0, 1, [], []),
        ("RR", "R", 3, 0, 1, [], ["o1"]),
        # both
        ("RRR", "", 3, 1, 1, [0], ["o2"]),
        ("RR", "s", 3, 1, 1, [1], []),
        ("RR", "ss", 3, 1, 1, [], []),
        ("RR", "Rs", 3, 1, 1, [], ["o1"]),
        ("RRRR", "", 4, 2, 2, [0, 1], ["o2", "o3"]),
        # more may be missing than there are
        ("RR", "", 2, 0, 5, [], ["o0", "o1"]),
        ("RR", "", 2, 5, 0, [0, 1], []),
        ("RR", "RR", 2, 5, 0, [], ["o0", "o1"]),
        # those that serve nobody go at once, for they may hold the devices that are waited for
        ("s", "", 1, 1, 0, [0], ["o0"]),
        ("p", "", 1, 1, 0, [0], ["o0"]),
        ("p", "", 1, 0, 1, [], ["o0"]),
        ("sss", "", 3, 1, 0, [0], ["o0", "o1", "o2"]),
        ("RsR", "", 3, 1, 0, [0], ["o1"]),
        ("RsR", "", 3, 0, 1, [], ["o1"]),
        ("RR", "s", 3, 1, 0, [1], []),
        ("Rss", "R", 3, 1, 0, [], ["o1", "o2"]),
        ("RsR", "R", 3, 1, 0, [], ["o1"]),
        # scaling while it goes on
        ("RR", "s", 4, 1, 0, [1, 2], []),
        ("RR", "s", 1, 1, 0, [], ["o1"]),
        ("RRR", "s", 2, 1, 0, [], ["o2"]),
        ("RRR", "R", 1, 1, 0, [], ["o0", "o1", "o2"]),
        ("RR", "Rs", 1, 1, 0, [], ["n1", "o0", "o1"]),
        ("R", "ss", 1, 1, 0, [], ["n1"]),
        ("RR", "s", 0, 1, 0, [], ["n0", "o0", "o1"]),
        ("RR", "", 0, 1, 0, [], ["o0", "o1"]),
        ("RR", "", 5, 0, 1, [0, 1, 2], []),
    ],
)
def test_a_rollout_step(
    old: str, new: str, replicas: int, surge: int, unavailable: int, create: list[int], remove: list[str]
) -> None:
    assert shown(change(old, new, replicas, surge=surge, unavailable=unavailable)) == (create, remove)


@pytest.mark.parametrize(
    ("old", "new", "replicas", "surge", "unavailable", "create", "remove"),
    [
        ("R", "s", 1, 1, 0, [], []),
        ("RRR", "s", 3, 2, 0, [], []),
        ("RRR", "Rs", 3, 2, 0, [], ["o2"]),
        ("RR", "s", 3, 0, 1, [], []),
        ("RR", "s", 3, 1, 1, [], []),
        ("RsR", "s", 3, 1, 0, [], []),
        ("Rs", "s", 2, 1, 0, [], []),
        ("s", "s", 1, 1, 0, [], []),
        # scaling down goes on
        ("RRR", "s", 2, 1, 0, [], ["o2"]),
        ("RRR", "s", 1, 1, 0, [], ["o1", "o2"]),
        ("RRs", "s", 2, 1, 0, [], ["o2"]),
        ("RR", "s", 0, 1, 0, [], ["n0", "o0", "o1"]),
        ("R", "ss", 1, 1, 0, [], ["n1"]),
        # up as well, but by no group that is known to fail
        ("RR", "s", 5, 1, 0, [], []),
        # without anything older there is nothing to protect
        ("", "s", 3, 1, 0, [1, 2], []),
        ("", "ss", 1, 1, 0, [], ["n1"]),
    ],
)
def test_a_broken_revision_stops_the_rollout(
    old: str, new: str, replicas: int, surge: int, unavailable: int, create: list[int], remove: list[str]
) -> None:
    assert shown(change(old, new, replicas, surge=surge, unavailable=unavailable, broken=True)) == (create, remove)


@pytest.mark.parametrize(
    ("old", "new", "create", "remove"),
    [
        ("RR", "", [0], []),
        ("RR", "p", [], []),
        ("RR", "s", [], []),
        ("Rp", "", [0], ["o1"]),
        ("Rp", "p", [], ["o1"]),
        ("Rp", "s", [], ["o1"]),
        ("R", "s", [1], []),
        ("R", "p", [], []),
    ],
)
def test_a_rollout_of_several_nodes_waits_for_places(old: str, new: str, create: list[int], remove: list[str]) -> None:
    assert shown(change(old, new, 2, nodes=2)) == (create, remove)


@pytest.mark.parametrize(
    ("old", "new", "unavailable", "remove"),
    [
        ("s", "", 0, []),
        ("s", "p", 0, []),
        ("s", "s", 0, []),
        ("s", "R", 0, ["o0"]),
        ("s", "", 1, ["o0"]),
        ("ss", "", 0, ["o1"]),
        ("sR", "", 0, ["o0"]),
    ],
)
def test_an_old_group_that_may_return_stays_while_too_few_serve(old: str, new: str, unavailable: int, remove: list[str]) -> None:
    first = names.group("chat", OLD, 0)
    assert shown(change(old, new, 1, unavailable=unavailable, returning={first}))[1] == remove


@pytest.mark.parametrize("replicas", [1, 2])
def test_pods_that_serve_by_themselves_outlive_one_that_restarts_in_a_rollout(replicas: int) -> None:
    world = settled({"parallelism": {"data": 4}, "replicas": replicas})
    old = world.sets()[0]["metadata"]["name"]
    world.edit({"image": "new:2"})
    world.reconcile()
    world.tick()
    world.crash_container(world.members(old)[3])
    world.tick()
    assert [deletion.name for deletion in world.decide().delete if deletion.kind == "StatefulSet"] == []
    world.settle()
    assert len(world.available()) == replicas
    assert all(old not in name for name in world.available())


def test_a_group_whose_probes_fail_for_a_moment_outlives_it_and_one_that_stays_away_goes() -> None:
    world = settled({})
    world.node_slots = 1
    world.edit({"image": "new:2"})
    world.reconcile()
    world.tick()
    old = world.sets()[0]["metadata"]["name"]
    world.crash_container(world.members(old)[0])

    def gone() -> list[str]:
        return [deletion.name for deletion in world.decide().delete if deletion.kind == "StatefulSet"]

    world.now += 1
    world.members(old)[0].unready_since = world.now
    assert gone() == []
    left = world.decide().requeue_after
    assert left is not None and left <= 31
    world.now += 29
    assert gone() == []
    world.now += 2
    assert gone() == [old], "the new group waits for its node"


@pytest.mark.parametrize(("replicas", "create"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 4])])
def test_a_name_whose_pods_still_drain_is_not_free(replicas: int, create: list[int]) -> None:
    leaving = tuple(make_pod(names.group("chat", NEW, index), deleted_at=1.0) for index in (0, 2))
    assert shown(change("", "", replicas, leaving=leaving)) == (create, [])


def test_a_group_has_never_more_than_three_digits() -> None:
    leaving = tuple(make_pod(names.group("chat", NEW, index), deleted_at=1.0) for index in range(names.MAX_INDEX + 1))
    assert change("", "", 1, leaving=leaving).create == ()
    assert change("", "", 1, leaving=leaving[:-1]).create == (999,)
    assert len(names.group("s" * 40, "r" * 7, 999)) == 52


@pytest.mark.parametrize("surge", range(4))
@pytest.mark.parametrize("unavailable", range(4))
@pytest.mark.parametrize("replicas", range(1, 5))
def test_a_healthy_rollout_ends_within_its_limits(replicas: int, surge: int, unavailable: int) -> None:
    """Carried out to the end, with new groups that start in one step."""
    old, new = "R" * replicas, ""
    floor = replicas - (unavailable if surge or unavailable else 1)
    for _ in range(4 * replicas + 4):
        decided = change(old, new, replicas, surge=surge, unavailable=unavailable)
        gone = sum(not group.target for group in decided.remove)
        assert old.count("R") + new.count("R") - gone >= min(floor, replicas)
        if decided.create:
            assert len(old) + len(new) + len(decided.create) <= replicas + surge
        old, new = old[: len(old) - gone], new.replace("s", "R") + "s" * len(decided.create)
    assert (old, new) == ("", "R" * replicas)
