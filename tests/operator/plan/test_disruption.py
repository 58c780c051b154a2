"""Pods that are terminated on purpose: evictions, drained nodes. No stream is cut, and no node waits for ever."""

from collections.abc import Callable
from typing import Any

import pytest
from starling_operator.plan.disruption import SCHEDULING_SECONDS

from tests.operator.plan.world import BAD, OTHER, PAIRS, Member, World, names, settled

UNTIED = {"parallelism": {"data": 2}}
ALONE = {"rollout": {"maxUnavailable": 1}}


def evictable(world: World) -> int:
    """Pods that may be evicted, after the operator has written its decision."""
    world.reconcile()
    return max(0, world.evictable())


@pytest.mark.parametrize(
    ("changes", "pods"),
    [
        # another group is created ahead of a single one, whatever its size
        ({}, 0),
        (PAIRS, 0),
        # unless nobody minds
        (ALONE, 1),
        (PAIRS | ALONE, 1),
        # one of several may go, or as many as may be missing: each by one pod, which takes its whole group along
        ({"replicas": 2}, 1),
        ({"replicas": 3} | PAIRS, 1),
        ({"replicas": 3, "rollout": {"maxUnavailable": 2}} | PAIRS, 2),
        ({"replicas": 2, "rollout": {"maxUnavailable": 5}}, 2),
        # nodes that know nothing of each other go one by one
        (UNTIED, 1),
    ],
)
def test_as_many_pods_may_be_evicted_as_groups_may_go(changes: dict[str, Any], pods: int) -> None:
    assert evictable(settled(changes)) == pods


@pytest.mark.parametrize("changes", [{}, PAIRS])
def test_where_nobody_may_see_what_is_cordoned_one_group_may_always_go(changes: dict[str, Any]) -> None:
    world = settled(changes)
    world.cordoned = None
    assert evictable(world) == 1


@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_groups_that_start_give_no_room(shape: dict[str, Any]) -> None:
    world = settled({"replicas": 2} | shape)
    world.crash_container(world.pods[0])
    assert evictable(world) == 0, "the other group is the only one that serves"
    world.settle()
    assert evictable(world) == 1


@pytest.mark.parametrize("shape", [{}, PAIRS])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_drained_node_waits_for_one_start_and_no_group_is_missed(shape: dict[str, Any], replicas: int) -> None:
    world = settled({"replicas": replicas} | shape)
    for victim in [world.members(name)[-1] for name in names(world)]:
        world.cordon(victim)
        for _ in range(12):
            world.reconcile()
            if world.ask_to_evict(victim):
                break
            assert len(world.available()) >= 1
            world.tick()
        else:
            raise AssertionError(f"never evicted: {world.message()}")
        world.reconcile()
        assert victim.group not in names(world)
        assert len(world.available()) >= 1
        world.settle()
        assert world.condition("Ready") == ("True", "Serving"), world.message()
        assert len(world.available()) == len(world.sets()) == replicas
    assert world.event_reasons("Restarted") == []
    assert all(group.restarts == 0 for group in world.status.groups)


@pytest.mark.parametrize(("unavailable", "left"), [(0, 3), (1, 3), (2, 2), (9, 0)])
@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_many_who_evict_at_once_take_no_more_groups_than_may_be_missing(shape: dict[str, Any], unavailable: int, left: int) -> None:
    world = settled({"replicas": 4, "rollout": {"maxUnavailable": unavailable}} | shape)
    world.reconcile()
    for member in list(world.pods):
        world.ask_to_evict(member)
    assert len(world.available()) >= left
    world.settle()
    assert len(world.available()) == 4


@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_a_cordon_brings_another_group_and_its_end_sends_one_away(shape: dict[str, Any]) -> None:
    world = settled(shape)
    before = world.available()
    world.cordon(world.pods[0])
    world.reconcile()
    assert world.condition("Ready") == ("False", "Draining")
    assert "is on a cordoned node" in world.message()
    world.settle()
    assert len(world.available()) == 2
    assert world.condition("Ready") == ("True", "Serving"), "who cordons may never evict"
    world.cordoned = frozenset()
    world.settle()
    assert world.available() == before, "the younger one goes"


@pytest.mark.parametrize(
    "hinder",
    [
        pytest.param(lambda world: setattr(world, "node_slots", len(world.pods)), id="no node is free"),
        pytest.param(lambda world: setattr(world, "quota", "exceeded quota: pods"), id="a quota refuses it"),
    ],
)
@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_an_eviction_does_not_wait_for_a_group_that_cannot_come(shape: dict[str, Any], hinder: Callable[[World], None]) -> None:
    world = settled(shape)
    hinder(world)
    world.cordon(world.pods[0])
    for _ in range(5):
        world.reconcile()
        world.tick()
    requeue_after = world.decide().requeue_after
    assert requeue_after is not None and requeue_after <= SCHEDULING_SECONDS + 1
    world.tick(SCHEDULING_SECONDS)
    assert evictable(world) == 1
    assert world.ask_to_evict(world.pods[0])
    world.node_slots, world.quota = 100, ""
    world.settle()
    assert len(world.available()) == 1


@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_an_eviction_does_not_wait_for_a_group_whose_statefulset_is_refused(shape: dict[str, Any]) -> None:
    world = settled(shape)
    world.most_sets = 1
    world.cordon(world.pods[0])
    assert evictable(world) == 0, "nobody knows yet"
    assert evictable(world) == 1
    assert world.ask_to_evict(world.pods[0])
    world.settle()
    assert len(world.available()) == 1, "the quota holds one, and that one has gone"


def test_an_eviction_does_not_wait_for_a_group_that_comes_no_further() -> None:
    world = settled({"rollout": {"progressDeadlineSeconds": 300}})
    world.cordon(world.pods[0])
    world.reconcile()
    world.tick()
    world.silence(world.pods[-1])
    assert evictable(world) == 0
    world.tick(300)
    assert evictable(world) == 0
    world.tick(1)
    assert evictable(world) == 1


WRONG = {"engine": {"extraArgs": {"noSuchArgument": 1}}}


@pytest.mark.parametrize(("changes", "before"), [({}, 0), (ALONE, 1), ({"replicas": 2}, 1), ({"replicas": 3}, 1)])
@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_a_node_is_emptied_while_the_spec_cannot_be_carried_out(
    shape: dict[str, Any], changes: dict[str, Any], before: int
) -> None:
    world = settled(changes | shape)
    world.edit(WRONG)
    assert evictable(world) == before
    victim = world.pods[0]
    world.cordon(victim)
    assert evictable(world) == 1, "nothing comes first"
    assert world.ask_to_evict(victim)
    assert evictable(world) == 0 or len(world.sets()) == 1, "the others stay until it is back"
    world.settle()
    assert victim.group in world.available(), "in its own place"
    assert world.condition("Stalled") == ("True", "InvalidSpec")
    assert all(group.restarts == 0 for group in world.status.groups)


def test_while_the_spec_cannot_be_carried_out_a_group_that_waits_for_a_node_is_not_waited_for_long() -> None:
    world = World({"replicas": 2}, node_slots=1)
    world.settle()
    world.edit(WRONG)
    world.cordon(world.pods[0])
    assert evictable(world) == 0
    requeue_after = world.decide().requeue_after
    assert requeue_after is not None
    world.tick(requeue_after)
    assert evictable(world) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_a_gang_drains_as_a_whole_and_another_takes_its_place(which: int) -> None:
    """The new group has another name, so its leader finds no node of the old one."""
    world = settled(PAIRS)
    (old,) = names(world)
    pods = world.members(old)
    world.evict(pods[which])
    decision = world.reconcile()
    assert [(deletion.kind, deletion.name, deletion.grace_seconds) for deletion in decision.delete] == [("StatefulSet", old, None)]
    (new,) = names(world)
    assert new != old
    assert ("Service", old) in world.children, "its pods still have to find each other"
    assert world.event_reasons() == ["Draining"]
    assert world.condition("Ready") == ("False", "Draining")
    world.settle()
    assert world.available() == [new]
    assert ("Service", old) not in world.children
    assert world.event_reasons("Restarted") == []
    assert world.status.groups[0].restarts == 0


@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_a_node_that_shuts_down_takes_the_whole_group_along(shape: dict[str, Any]) -> None:
    world = settled(shape)
    (old,) = names(world)
    world.shut_down(world.pods[-1])
    decision = world.reconcile()
    assert [(deletion.kind, deletion.name) for deletion in decision.delete] == [("StatefulSet", old)]
    assert world.condition("Ready") == ("False", "Draining")
    world.settle()
    assert len(world.available()) == 1
    assert world.available() != [old]
    assert world.event_reasons("Restarted") == []


def test_any_number_of_evictions_costs_no_restart() -> None:
    world = settled(PAIRS | {"recovery": {"restartBudget": 2}})
    for _ in range(6):
        world.evict(world.pods[-1])
        world.settle()
        assert world.condition("Ready") == ("True", "Serving"), world.message()
    assert world.event_reasons("Restarted") == []


def test_nodes_that_know_nothing_of_each_other_drain_alone() -> None:
    world = settled(UNTIED)
    (name,) = names(world)
    world.evict(world.members(name)[1])
    assert world.reconcile().delete == ()
    assert names(world) == [name]
    assert world.event_reasons() == []


def test_while_a_new_revision_is_broken_an_old_group_comes_back_in_its_place() -> None:
    world = settled(PAIRS)
    (old,) = names(world)
    world.edit({"model": {"source": BAD}})
    world.settle()
    assert world.available() == [old]
    world.evict(world.members(old)[0])
    (deletion,) = [deletion for deletion in world.reconcile().delete if deletion.kind == "Pod"]
    assert (deletion.name, deletion.grace_seconds) == (f"{old}-1", None), "its streams have the time of a drain"
    world.settle()
    assert world.available() == [old]
    assert world.event_reasons("Restarted") == []


def test_a_rollout_goes_on_over_an_eviction() -> None:
    world = settled({"replicas": 2} | PAIRS)
    world.edit(OTHER)
    world.reconcile()
    world.evict(next(member for member in world.pods if world.status.revision.target != member.revision))
    world.settle()
    assert world.condition("Ready") == ("True", "Serving"), world.message()
    assert len(world.available()) == len(world.sets()) == 2


def test_the_budget_is_min_available_which_looks_at_no_owner() -> None:
    """The StatefulSet of pods that drain is gone: with maxUnavailable the API server would refuse every eviction."""
    world = settled({"replicas": 2} | PAIRS)
    budget = world.children["PodDisruptionBudget", "chat"]["spec"]
    assert budget["minAvailable"] == 3
    assert "maxUnavailable" not in budget
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_while_a_group_drains_another_may_be_evicted() -> None:
    world = settled({"replicas": 3})
    world.edit({"replicas": 2})
    world.reconcile()
    world.tick(0)
    assert any(_drains(member) for member in world.pods)
    assert evictable(world) == 1


def _drains(member: Member) -> bool:
    return member.deleted_at is not None
