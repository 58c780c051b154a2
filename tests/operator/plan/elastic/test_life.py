"""An elastic service from its first size to its last, in the tiny cluster."""

from typing import Any

import pytest
from starling_crds.v1alpha1.status import GroupStatus, Size

from tests.operator.plan.building import make_spec
from tests.operator.plan.elastic.world import ElasticWorld, elastic
from tests.operator.plan.world import names


def running(size: int = 2, **more: Any) -> ElasticWorld:
    world = ElasticWorld(elastic(size, **more))
    world.settle()
    assert world.condition("Ready") == ("True", "Serving"), world.message()
    world.events.clear()
    world.calls.clear()
    return world


def resize(world: ElasticWorld, size: int) -> None:
    world.edit({"parallelism": {"expert": size}})


def group(world: ElasticWorld, number: int = 0) -> GroupStatus:
    return world.status.groups[number]


def until_phase(world: ElasticWorld, phase: str) -> None:
    for _ in range(100):
        world.reconcile()
        operation = group(world).operation if world.status.groups else None
        if operation is not None and operation.phase == phase:
            return
        world.tick()
    raise AssertionError(f"never {phase}: {world.status}")


def test_the_first_size_is_an_operation() -> None:
    world = ElasticWorld(elastic(2))
    world.settle()
    assert world.sizes() == [2]
    assert [(call.operation[-4:], call.data) for call in world.calls] == [("-2-1", 2)]
    assert world.status.topology == "TP1 PP1 DP2 EP2"
    operation = group(world).operation
    assert operation is not None
    assert (operation.source.data, operation.target.data, operation.phase) == (0, 2, "done")


def test_a_first_size_shows_its_progress() -> None:
    world = ElasticWorld(elastic(2))
    until_phase(world, "preparing")
    assert world.condition("Ready") == ("False", "Progressing")
    assert world.message().endswith("; EP 0 -> 2: preparing"), world.message()


def test_a_first_size_that_cannot_be_had() -> None:
    world = ElasticWorld(elastic(4))
    world.largest = 3
    world.settle()
    assert world.condition("Stalled") == ("True", "ScalingFailed")
    assert "EP 0 -> 4; refused by its leader: data: at most 3 is possible, got 4" in world.message()
    resize(world, 3)
    world.settle()
    assert (world.sizes(), world.condition("Ready")[0]) == ([3], "True")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2), (8, 1), (3, 5), (5, 4)])
def test_a_live_group_changes_size(before: int, after: int) -> None:
    world = running(before)
    groups, uids = names(world), {member.uid for member in world.pods}
    resize(world, after)
    world.settle()
    assert names(world) == groups
    assert world.sizes() == [after]
    assert len(world.pods) == after
    assert len(uids & {member.uid for member in world.pods}) == min(before, after)
    assert world.condition("Ready") == ("True", "Serving")
    assert [(call.data) for call in world.calls] == [after]
    assert group(world).effective == group(world).desired == Size(data=after, expert=after)
    assert world.event_reasons()[0] == "Scaling"
    assert world.event_reasons()[-2:] == ["Resized", "Ready"]


def test_it_serves_all_the_while_and_shows_its_progress() -> None:
    world = running(2)
    resize(world, 4)
    seen = set()
    for _ in range(60):
        world.reconcile()
        assert world.condition("Available") == ("True", "GroupsServe"), world.message()
        assert world.available()
        if world.condition("Ready")[0] == "True":
            break
        assert world.condition("Ready") in (("False", "Scaling"), ("False", "Unschedulable"))
        assert world.message().startswith("EP 2 -> 4"), world.message()
        assert group(world).ready
        seen.add(world.message().partition("; ")[0])
        world.tick()
    assert {f"EP 2 -> 4: {phase}" for phase in ("waiting", "preparing", "committing")} <= seen


def test_pods_leave_last_and_join_first() -> None:
    world = running(4)
    resize(world, 2)
    until_phase(world, "releasing")
    assert len(world.sets()) == 1
    world.streams = 1
    for _ in range(3):
        world.reconcile()
        world.tick()
    assert world.sets()[0]["spec"]["replicas"] == 4
    assert "streams through leaving pods are open" in world.message()
    assert group(world).message == "EP 4 -> 2: releasing"
    world.streams = 0
    world.settle()
    assert world.sets()[0]["spec"]["replicas"] == 2


@pytest.mark.parametrize("phase", ["waiting", "preparing", "committing", "releasing"])
@pytest.mark.parametrize("other", [1, 2, 3, 6])
def test_another_size_is_wanted_in_the_middle(phase: str, other: int) -> None:
    world = running(2)
    resize(world, 4)
    until_phase(world, phase)
    resize(world, other)
    world.settle()
    assert world.sizes() == [other]
    assert len(world.pods) == other
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("phase", ["waiting", "preparing", "committing", "releasing"])
def test_a_leader_that_dies_in_the_middle(phase: str) -> None:
    world = running(2)
    resize(world, 4)
    until_phase(world, phase)
    world.crash_container(world.members(names(world)[0])[0])
    world.settle()
    assert world.sizes() == [4]
    assert world.condition("Ready") == ("True", "Serving"), world.message()


@pytest.mark.parametrize("which", [1, 3])
def test_a_joiner_that_fails_is_made_again_and_the_others_serve_on(which: int) -> None:
    """Pod 1 is of the serving epoch: there the whole gang restarts."""
    world = running(2)
    resize(world, 4)
    until_phase(world, "waiting")
    world.tick()
    before = {member.uid for member in world.pods}
    victim = next(member for member in world.pods if member.number == which)
    world.stumble(victim)
    if which == 3:
        for _ in range(10):
            world.reconcile()
            world.tick()
            assert world.available()
    world.settle()
    assert world.sizes() == [4]
    kept = before & {member.uid for member in world.pods}
    assert len(kept) == (3 if which == 3 else 0)


def test_new_pods_without_a_node_are_reported_and_can_be_taken_back() -> None:
    world = running(2)
    world.node_slots = 2
    resize(world, 4)
    for _ in range(20):
        world.reconcile()
        world.tick()
    assert world.condition("Ready") == ("False", "Unschedulable")
    assert world.condition("Available") == ("True", "GroupsServe")
    assert "EP 2 -> 4: waiting" in world.message()
    assert "0/2 nodes are available" in world.message()
    resize(world, 2)
    world.settle()
    assert (world.sizes(), len(world.pods)) == ([2], 2)
    assert world.condition("Ready") == ("True", "Serving")


def test_a_quota_is_reported_and_can_be_taken_back() -> None:
    world = running(2)
    world.quota = "exceeded quota: pods=2"
    resize(world, 4)
    for _ in range(20):
        world.reconcile()
        world.tick()
    assert world.condition("Ready") == ("False", "PodsRefused")
    assert "exceeded quota" in world.message()
    assert world.available()
    resize(world, 2)
    world.settle()
    assert (world.sizes(), world.condition("Ready")[0]) == ([2], "True")


def test_a_failure_is_tried_again() -> None:
    world = running(2)
    world.failures = 2
    resize(world, 4)
    world.settle()
    assert world.sizes() == [4]
    assert [call.operation[-4:] for call in world.calls] == ["-4-2", "-4-3", "-4-4"]
    assert world.event_reasons("ScalingFailed") == ["ScalingFailed"] * 2
    assert all(name in world.available() for name in names(world))


def test_a_budget_of_failures_ends_and_the_old_size_serves() -> None:
    world = running(2, recovery={"restartBudget": 2, "windowSeconds": 3600})
    world.failures = 100
    resize(world, 4)
    for _ in range(100):
        world.reconcile()
        world.tick(10)
    assert world.condition("Stalled") == ("True", "ScalingFailed")
    assert "failed 3 times: no memory for the experts" in world.message()
    assert (world.sizes(), len(world.pods)) == ([2], 2)
    assert len(world.calls) == 3
    resize(world, 3)
    world.failures = 0
    world.settle()
    assert world.sizes() == [3]


def test_a_size_that_the_leader_refuses_for_good() -> None:
    world = running(2)
    world.largest = 3
    resize(world, 4)
    world.settle()
    assert world.condition("Stalled") == ("True", "ScalingFailed")
    assert "at most 3 is possible, got 4" in world.message()
    assert (len(world.calls), len(world.pods), world.sizes()) == (1, 2, [2])
    resize(world, 3)
    world.settle()
    assert world.sizes() == [3]


def test_a_call_that_does_not_arrive_is_made_again_by_the_same_id() -> None:
    world = running(2)
    world.deaf = True
    resize(world, 4)
    for _ in range(10):
        world.reconcile()
        world.tick()
    assert len(world.calls) > 2
    assert len({call.operation for call in world.calls}) == 1
    world.deaf = False
    world.settle()
    assert world.sizes() == [4]


def test_a_lost_status_adopts_the_leaders_operation() -> None:
    world = running(2)
    resize(world, 4)
    until_phase(world, "preparing")
    before = group(world).operation
    assert before is not None
    world.status = type(world.status)()
    world.reconcile()
    after = group(world).operation
    assert after is not None
    assert after.id == before.id
    world.settle()
    assert world.sizes() == [4]
    assert len(world.calls) == 1


def test_groups_change_one_after_the_other() -> None:
    world = running(2, replicas=3)
    resize(world, 3)
    most = 0
    for _ in range(200):
        world.reconcile()
        busy = [leader.newest for leader in world.leaders.values() if leader.newest is not None and not leader.newest.ended]
        most = max(most, len(busy))
        assert len(world.available()) == 3
        if world.condition("Ready")[0] == "True":
            break
        assert "groups are to change" in world.message()
        world.tick()
    assert (most, world.sizes()) == (1, [3, 3, 3])


def test_a_size_that_one_group_cannot_have_is_not_tried_on_the_others() -> None:
    world = running(2, replicas=2)
    world.largest = 2
    resize(world, 4)
    world.settle()
    assert (len(world.calls), world.sizes()) == (1, [2, 2])


def test_a_suspended_service_stops_in_the_middle_and_comes_back_at_the_new_size() -> None:
    world = running(2)
    resize(world, 4)
    until_phase(world, "preparing")
    world.edit({"suspend": True})
    world.settle()
    assert (world.pods, world.sets()) == ([], [])
    assert world.condition("Ready") == ("False", "Suspended")
    world.edit({"suspend": False})
    world.settle()
    assert world.sizes() == [4]


def test_a_rolling_update_in_the_middle_makes_groups_of_the_new_size() -> None:
    world = running(2)
    old = names(world)
    resize(world, 4)
    until_phase(world, "preparing")
    world.edit({"engine": {"blockSize": 32}})
    for _ in range(100):
        world.reconcile()
        assert world.available()
        world.tick()
        if world.condition("Ready")[0] == "True":
            break
    world.settle()
    assert world.sizes() == [4]
    assert names(world) != old


@pytest.mark.parametrize("edit", [{"image": "new:2"}, {"parallelism": {"elastic": {"min": 1, "max": 4}}}])
def test_a_growth_without_nodes_holds_up_no_rollout(edit: dict[str, Any]) -> None:
    world = running(2)
    world.node_slots = 7
    resize(world, 8)
    for _ in range(20):
        world.reconcile()
        world.tick()
    assert world.condition("Ready") == ("False", "Unschedulable")
    old = names(world)
    world.edit(edit | {"parallelism": {"expert": 2, **edit.get("parallelism", {})}})
    world.settle()
    assert (world.sizes(), world.condition("Ready")) == ([2], ("True", "Serving"))
    assert names(world) != old


def test_a_growth_without_nodes_holds_up_no_other_group() -> None:
    world = running(2, high=4)
    world.node_slots = 3
    resize(world, 4)
    for _ in range(20):
        world.reconcile()
        world.tick()
    world.edit({"replicas": 2})
    world.reconcile()
    assert len(names(world)) == 2
    world.node_slots = 8
    world.settle()
    assert (world.sizes(), world.condition("Ready")) == ([4, 4], ("True", "Serving"))


def test_a_refused_edit_keeps_the_operation_in_the_status() -> None:
    world = running(2)
    resize(world, 4)
    until_phase(world, "preparing")
    before = group(world).operation
    world.edit({"engine": {"extraArgs": {"nonsense": 1}}})
    world.reconcile()
    assert world.condition("Stalled") == ("True", "InvalidSpec")
    assert group(world).operation == before
    world.changes["engine"] = {}
    world.generation += 1
    world.settle()
    assert world.sizes() == [4]


def test_bounds_that_go_make_a_rolling_update_and_take_the_scale_away() -> None:
    world = running(2)
    old = names(world)
    world.changes = {"parallelism": {"expert": 2}}
    world.generation += 1
    assert make_spec(world.changes).parallelism.elastic is None
    world.reconcile()
    assert names(world) != old
    assert ("ParallelismScale", "chat") not in world.children
