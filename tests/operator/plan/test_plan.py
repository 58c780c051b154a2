"""Whole decisions: lives of a service in a tiny cluster, and what its status and events say of them."""

from typing import Any

import pytest
from starling_operator.plan.plan import plan

from tests.operator.plan.building import conditions_of, make_observed, make_spec, message_of
from tests.operator.plan.world import BAD, DRAIN_TICKS, OTHER, PAIRS, World, names, settled


def test_at_first_sight_a_service_is_not_ready() -> None:
    """kstatus takes an object without a Ready condition for one that is done."""
    status = plan(make_observed()).status
    assert conditions_of(status) == {
        "Ready": ("False", "Progressing"),
        "Reconciling": ("True", "Progressing"),
        "Stalled": ("False", "NotStalled"),
        "Available": ("False", "NoGroupServes"),
        "Progressing": ("True", "Progressing"),
        "ModelLoaded": ("False", "NoGroups"),
    }
    assert status.observed_generation == 1


def test_endpoints_at_addresses_of_ipv6_have_brackets() -> None:
    world = World(address="fd00::1")
    world.settle()
    assert world.status.endpoints == ["[fd00::1]:8000"]


def test_a_settled_service() -> None:
    world = settled({"replicas": 2})
    assert conditions_of(world.status) == {
        "Ready": ("True", "Serving"),
        "Reconciling": ("False", "Settled"),
        "Stalled": ("False", "NotStalled"),
        "Available": ("True", "GroupsServe"),
        "Progressing": ("False", "Complete"),
        "ModelLoaded": ("True", "Loaded"),
    }
    status = world.status
    assert (status.replicas, status.ready_replicas, status.updated_replicas) == (2, 2, 2)
    assert status.selector == "serving.starling.dev/service=chat,apps.kubernetes.io/pod-index=0"
    assert status.topology == "TP1 PP1 DP1"
    assert status.endpoints == ["10.0.0.1:8000"] * 2
    assert status.revision.current == status.revision.target
    assert [group.name for group in status.groups] == names(world)
    (node,) = status.groups[0].nodes
    assert (node.pod, node.number, node.phase) == (f"{names(world)[0]}-0", 0, "serving")


def test_a_settled_service_needs_nothing() -> None:
    world = settled({"replicas": 2})
    decision = world.decide()
    assert (decision.create, decision.delete, decision.events, decision.requeue_after) == ((), (), (), None)
    assert decision.status == world.status
    world.now += 1000
    assert world.decide() == decision, "the time alone changes nothing"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ({}, "http://chat.prod.svc.cluster.local/v1"),
        ({"port": 8080}, "http://chat.prod.svc.cluster.local:8080/v1"),
        ({"port": 443}, "http://chat.prod.svc.cluster.local:443/v1"),
        ({"tlsSecret": "t", "port": 443}, "https://chat.prod.svc.cluster.local/v1"),
        ({"tlsSecret": "t"}, "https://chat.prod.svc.cluster.local:80/v1"),
    ],
)
def test_the_url_leaves_out_the_usual_port(endpoint: dict[str, Any], url: str) -> None:
    assert plan(make_observed(make_spec({"endpoint": endpoint}))).status.url == url


def test_the_status_shows_how_far_the_model_is() -> None:
    world = World()
    world.reconcile()
    loaded = []
    for _ in range(6):
        world.tick()
        world.reconcile()
        loaded.append(conditions_of(world.status)["ModelLoaded"])
    assert loaded == [
        ("False", "Starting"),
        ("False", "Downloading"),
        ("False", "Loading"),
        ("True", "Loaded"),
        ("True", "Loaded"),
        ("True", "Loaded"),
    ]


def test_a_transition_keeps_its_time() -> None:
    world = settled()
    first = {condition.type: condition.last_transition_time for condition in world.status.conditions}
    world.now += 500
    world.edit(OTHER)
    world.reconcile()
    second = {condition.type: condition.last_transition_time for condition in world.status.conditions}
    moved = {kind for kind in first if first[kind] != second[kind]}
    assert moved == {"Ready", "Reconciling", "Progressing"}
    assert all(condition.observed_generation == 2 for condition in world.status.conditions)


@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_scaling_up_and_down(shape: dict[str, Any]) -> None:
    world = settled({"replicas": 1} | shape)
    world.edit({"replicas": 3})
    world.reconcile()
    assert world.condition("Ready") == ("False", "Scaling")
    assert world.condition("Available") == ("True", "GroupsServe")
    world.settle()
    assert len(world.available()) == 3
    world.edit({"replicas": 2})
    world.settle()
    assert [name[-1] for name in world.available()] == ["0", "1"]
    assert world.event_reasons("Scaled", "Ready") == ["Scaled", "Ready", "Scaled", "Ready"]
    assert len(world.event_reasons("Created")) == 2


def test_groups_of_several_nodes_never_wait_for_each_other_s_nodes() -> None:
    """Nodes for three pods: two groups of two pods that are made at once could get one and two."""
    world = World({"replicas": 2} | PAIRS, node_slots=3)
    for _ in range(12):
        world.reconcile()
        world.tick()
    assert len(world.available()) == 1
    assert world.condition("Available") == ("True", "GroupsServe")
    assert world.condition("Ready")[0] == "False"
    assert "Unschedulable" in world.message()
    world.node_slots = 4
    world.settle()
    assert len(world.available()) == 2


def test_an_unschedulable_pod_is_no_failure_and_is_reported() -> None:
    world = World(node_slots=0)
    for _ in range(3):
        world.reconcile()
        world.tick()
    assert world.condition("Ready") == ("False", "Unschedulable")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert "-0-0: Unschedulable: 0/2 nodes are available" in world.message()


@pytest.mark.parametrize("shape", [{}, PAIRS])
@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1), (2, 2), (3, 0)])
def test_a_rollout_replaces_all_groups(shape: dict[str, Any], surge: int, unavailable: int) -> None:
    world = settled({"replicas": 3} | shape)
    old = set(names(world))
    world.edit(OTHER | {"rollout": {"maxSurge": surge, "maxUnavailable": unavailable}})
    world.reconcile()
    assert world.condition("Ready") == ("False", "RollingOut")
    world.settle()
    assert not old & set(names(world))
    assert world.condition("Ready") == ("True", "Serving")
    assert world.event_reasons("RolloutStarted", "RolloutFinished", "Ready") == ["RolloutStarted", "Ready", "RolloutFinished"]


def test_available_stays_true_while_rolling() -> None:
    world = settled({"replicas": 3})
    world.edit(OTHER)
    for _ in range(40):
        world.reconcile()
        assert world.condition("Available") == ("True", "GroupsServe")
        world.tick()
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_a_bad_revision_stops_and_the_old_one_serves(shape: dict[str, Any]) -> None:
    world = settled({"replicas": 3} | shape)
    old = names(world)
    world.edit({"model": {"source": BAD}})
    world.settle()
    assert world.available() == old
    assert len(world.sets()) == 4
    assert world.condition("Available") == ("True", "GroupsServe")
    assert world.condition("Stalled") == ("True", "RolloutStalled")
    assert world.condition("Reconciling") == ("False", "Settled")
    assert "container agent failed: bad: config.json names no architecture" in world.message()
    assert world.event_reasons() == ["RolloutStarted", "Created", "RolloutStalled"]


def test_a_bad_first_revision() -> None:
    world = World({"model": {"source": BAD}})
    world.settle()
    assert world.condition("Stalled") == ("True", "GroupFailed")
    assert world.condition("Available") == ("False", "NoGroupServes")
    world.edit({"model": {"source": "hf://org/good"}})
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("cure", [{"model": {"source": "hf://org/name"}}, {"model": {"source": "hf://org/third"}}])
def test_from_a_bad_revision_back_or_forward(cure: dict[str, Any]) -> None:
    world = settled({"replicas": 3, "model": {"source": "hf://org/name"}})
    old = names(world)
    world.edit({"model": {"source": BAD}})
    world.settle()
    world.edit(cure)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert (names(world) == old) == (cure["model"]["source"] == "hf://org/name"), "going back needs no new group"


def test_scaling_up_while_a_rollout_is_stalled_says_how_many_serve() -> None:
    world = settled({"replicas": 2})
    world.edit({"model": {"source": BAD}})
    world.settle()
    world.edit({"replicas": 6})
    world.settle()
    assert world.condition("Stalled") == ("True", "RolloutStalled")
    assert world.message().startswith("2 of 6 groups serve; revision ") and "does not come up: " in world.message()


def test_scaling_down_while_a_rollout_is_stalled() -> None:
    world = settled({"replicas": 3})
    old = names(world)
    world.edit({"model": {"source": BAD}})
    world.settle()
    world.edit({"replicas": 2})
    world.settle()
    assert world.available() == old[:2]
    assert world.condition("Stalled") == ("True", "RolloutStalled")


def test_scaling_while_a_rollout_is_under_way() -> None:
    world = settled({"replicas": 2})
    world.edit(OTHER)
    world.reconcile()
    world.tick()
    world.edit({"replicas": 5})
    world.settle()
    assert len(world.available()) == len(world.sets()) == 5
    assert world.condition("Ready") == ("True", "Serving")


def test_an_edit_while_a_rollout_is_under_way() -> None:
    world = settled({"replicas": 2})
    for size in (8, 32):
        world.edit({"engine": {"blockSize": size}})
        world.reconcile()
        world.tick()
    world.settle()
    assert {group.revision for group in world.status.groups} == {world.status.revision.target}
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize(("changes", "reason"), [({"suspend": True}, "Suspended"), ({"replicas": 0}, "ScaledToZero")])
def test_turning_off_and_on_again(changes: dict[str, Any], reason: str) -> None:
    world = settled({"replicas": 2})
    kept = {key for key in world.children if key[0] not in ("StatefulSet", "Service")} | {("Service", "chat")}
    world.edit(changes)
    world.reconcile()
    assert world.condition("Reconciling")[0] == "True"
    world.settle()
    assert not world.pods
    assert set(world.children) == kept, "all but the groups stays"
    assert world.condition("Ready") == ("False", reason)
    assert world.condition("Reconciling") == ("False", "Settled")
    assert world.condition("Stalled") == ("False", "NotStalled")
    assert world.condition("Available")[0] == "False"
    world.edit({"suspend": False, "replicas": 2})
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_pods_of_a_group_that_goes_drain_and_its_number_is_not_used_before() -> None:
    world = settled({"replicas": 2})
    world.edit({"replicas": 1})
    world.reconcile()
    world.tick(0)
    assert [pod for pod in world.pods if pod.deleted_at is not None]
    world.edit({"replicas": 2})
    world.reconcile()
    assert sorted(name[-1] for name in names(world)) == ["0", "2"]


FAULTS = {
    "crash": World.crash_container,
    "break": World.break_agent,
    "stumble": World.stumble,
    "lose": World.lose_node,
    "evict": World.evict,
    "fail": World.fail_pod,
    "silence": World.silence,
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("shape", [{}, PAIRS])
def test_a_group_heals_and_the_others_go_on(fault: str, shape: dict[str, Any]) -> None:
    world = settled({"replicas": 2} | shape)
    first, second = names(world)
    untouched = {member.uid for member in world.members(second)}
    FAULTS[fault](world, world.members(first)[-1])
    for _ in range(90):
        world.reconcile()
        assert second in world.available()
        world.tick()
    assert world.condition("Ready") == ("True", "Serving"), world.message()
    assert {member.uid for member in world.members(second)} == untouched
    alone = fault == "evict" or (fault == "lose" and shape == {})
    assert world.event_reasons("Restarted") == ([] if alone else ["Restarted"])


@pytest.mark.parametrize("fault", ["crash", "lose", "break"])
def test_a_failure_in_the_back_off_is_remembered_until_its_time(fault: str) -> None:
    """A restart of one container, or a member that was replaced, leaves no trace by then but in the last status."""
    world = settled(PAIRS)
    (group,) = names(world)
    for _ in range(2):
        FAULTS[fault](world, world.members(group)[0])
        world.reconcile()
        while not world.available():
            world.tick()
            world.reconcile()
    assert world.event_reasons("Restarted") == ["Restarted", "Restarted"]
    assert world.status.groups[0].restarts == 2


def test_restarts_are_recorded_and_spaced() -> None:
    world = settled()
    gaps, last = [], world.now
    for _ in range(4):
        world.break_agent(world.pods[0])
        while not world.pods[0].deleted_at:
            world.reconcile()
            world.tick()
        gaps.append(world.now - last)
        last = world.now
        while not world.available():
            world.tick()
            world.reconcile()
    assert world.status.groups[0].restarts == 4
    assert len(world.status.groups[0].restarted_at) == 4
    assert gaps[0] <= 2
    assert gaps[1:] == sorted(gaps[1:])
    assert [low <= gap <= low + 8 for gap, low in zip(gaps[1:], (10, 20, 40), strict=True)] == [True] * 3


def test_an_exhausted_budget_leaves_the_group_alone_until_the_window_ends() -> None:
    world = settled({"replicas": 2, "recovery": {"restartBudget": 1, "windowSeconds": 600}})
    for _ in range(2):
        world.break_agent(world.members(names(world)[0])[0])
        world.settle()
    assert world.condition("Stalled") == ("True", "RestartBudgetExhausted")
    assert world.condition("Available") == ("True", "GroupsServe")
    assert "rank 0 died" in world.message()
    assert "1 restarts in 600 s" in world.message()
    assert world.event_reasons("RestartBudgetExhausted") == ["RestartBudgetExhausted"]
    requeue_after = world.decide().requeue_after
    assert requeue_after is not None
    world.tick(requeue_after)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_while_a_restart_waits_the_status_stays_the_same() -> None:
    """A write that changes would wake the operator, which would write again."""
    world = settled()
    world.break_agent(world.pods[0])
    world.reconcile()
    while not world.available():
        world.tick()
        world.reconcile()
    world.break_agent(world.pods[0])
    world.reconcile()
    first = world.status
    world.now += 1
    decision = world.reconcile()
    assert decision.status == first
    assert decision.requeue_after is not None
    assert world.condition("Ready") == ("False", "Recovering")
    assert "restarts at 20" in world.message()


def test_a_group_that_stumbles_at_its_start_is_tried_again_and_then_reported() -> None:
    world = World()
    for attempt in range(3):
        while not [pod for pod in world.pods if pod.stage == 1 and pod.deleted_at is None]:
            world.reconcile()
            world.tick()
        assert (world.condition("Stalled")[0] == "True") == (attempt >= 2)
        world.stumble(world.pods[0])
        world.reconcile()
    assert world.event_reasons("GroupFailed") == ["GroupFailed"]
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_a_new_operator_does_not_take_ready_away() -> None:
    world = settled({"replicas": 2})
    world.blind = True
    decision = world.reconcile()
    assert world.condition("Ready") == ("True", "Serving")
    assert decision.events == ()
    assert decision.status.topology == "TP1 PP1 DP1"


def test_a_new_operator_takes_nobody_s_word_for_a_new_generation() -> None:
    world = settled()
    world.blind = True
    world.edit({"replicas": 1, "endpoint": {"port": 8080}})
    world.reconcile()
    assert world.condition("Ready") == ("False", "Progressing")
    assert "has not reported yet" in world.message()


def test_a_lost_status_is_written_again_without_a_restart() -> None:
    world = settled({"replicas": 2} | PAIRS)
    status, pods = world.status, {pod.uid for pod in world.pods}
    world.status = type(status)()
    world.settle()
    assert world.status.groups == status.groups
    assert world.status.revision == status.revision
    assert {pod.uid for pod in world.pods} == pods


def test_what_an_operator_left_half_deleted_is_cleared_away() -> None:
    world = settled({"replicas": 2})
    gone = world.sets()[1]["metadata"]["name"]
    world.edit({"replicas": 1})
    decision = world.reconcile(writes=len(world.decide().apply) + 1)
    assert decision.delete[0].kind == "StatefulSet"
    assert ("Service", gone) in world.children
    world.settle()
    assert ("Service", gone) not in world.children
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("writes", range(13))
def test_an_operator_killed_after_any_write_of_a_new_service(writes: int) -> None:
    world = World({"replicas": 2})
    world.reconcile(writes)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert len(world.sets()) == 2


@pytest.mark.parametrize("writes", range(16))
def test_an_operator_killed_after_any_write_of_a_rollout(writes: int) -> None:
    world = settled({"replicas": 2})
    world.edit(OTHER)
    for _ in range(30):
        world.reconcile(writes)
        world.tick()
        world.reconcile()
        world.tick()
    world.settle()
    assert len(world.available()) == len(world.sets()) == 2
    assert world.condition("Ready") == ("True", "Serving")


def test_deletions_carry_uids() -> None:
    world = settled({"replicas": 2})
    world.edit({"replicas": 0})
    deletions, children = world.decide().delete, dict(world.children)
    assert [(deletion.kind, deletion.name[-1]) for deletion in deletions] == [
        ("StatefulSet", "1"),
        ("StatefulSet", "0"),
    ]
    world.reconcile()
    world.tick(0)
    assert not world.decide().delete, "by its Service the pods of a group find each other while they drain"
    for _ in range(DRAIN_TICKS):
        world.tick()
    services = world.decide().delete
    assert [(deletion.kind, deletion.name[-1]) for deletion in services] == [("Service", "0"), ("Service", "1")]
    for deletion in (*deletions, *services):
        assert deletion.uid == children[deletion.kind, deletion.name]["metadata"]["uid"]
        assert deletion.grace_seconds is None
        assert deletion.why


def test_the_message_of_a_service_that_comes_up_names_the_pod() -> None:
    world = World()
    world.reconcile()
    world.tick()
    world.tick()
    status = world.reconcile().status
    assert message_of(status, "Ready").startswith("0 of 1 groups serve; chat-")
    assert message_of(status, "Ready").endswith("-0-0: downloading")
