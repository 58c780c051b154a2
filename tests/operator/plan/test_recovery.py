"""Failures of a group, and what is done about them."""

from dataclasses import replace
from typing import Any

import pytest
from starling_crds.v1alpha1.lifecycle import RecoverySpec
from starling_crds.v1alpha1.status import GroupNode
from starling_operator.plan.failure import broken_cause, has_served, silence_limit
from starling_operator.plan.group import Group, nodes_form_gang, read_groups
from starling_operator.plan.observed import Pod
from starling_operator.plan.recovery import (
    RecoveryDecision,
    backoff,
    lost_pod_deletions,
    recovery_decision,
    restart_deletions,
    unobserved_pod_deletions,
)
from starling_operator.plan.timestamps import rfc3339

from tests.operator.plan.building import NOW, make_group, make_pod, make_report, pending, record
from tests.operator.plan.world import World

RECOVERY = RecoverySpec()
SERVED = {"token_seen": True}
LOADING = {"phase": "loading", "ready": False, "token_seen": False, "topology": None}


def known(group: Group, **fields: Any) -> Group:
    """The group as a status before recorded it."""
    return replace(group, previous=record(group, **fields))


def one(**fields: Any) -> Group:
    """A group of one pod that served; the fields are how its pod is now."""
    return replace(make_group(pods=[make_pod(**fields)]), previous=record(make_group()))


def two(first: dict[str, Any], second: dict[str, Any] | None = None) -> Group:
    """A group of two pods that served together; the fields are how they are now."""
    before = make_group(nodes=2)
    pods = [make_pod(number=0, **first), make_pod(number=1, **(second or {}))]
    return replace(make_group(pods=pods, nodes=2), previous=record(before))


def decide(group: Group, now: float = NOW, **recovery: Any) -> RecoveryDecision | None:
    return recovery_decision(group, RecoverySpec(**recovery), now)


FATAL = {"ready": False, "report": make_report(phase="failed", fatal=True, ready=False, last_error="out of memory")}
HUNG = {"ready": False, "report": make_report(healthy=False, ready=False, last_error="no step for 20 s")}
GAVE_UP = {"ready": False, "report": make_report(phase="failed", ready=False, last_error="3 restarts did not help")}
SILENT = {"ready": False, "report_age": 61.0}


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"phase": "Failed", "ready": False}, "ended as Failed"),
        ({"phase": "Failed", "ready": False, "report": None, "waiting": "Evicted: low on memory"}, "Evicted: low on memory"),
        ({"phase": "Succeeded", "ready": False}, "ended as Succeeded"),
        (FATAL, "out of memory"),
        (HUNG, "no step for 20 s"),
        (GAVE_UP, "3 restarts did not help"),
        (SILENT, "has not answered for 60 s"),
    ],
)
def test_a_failed_pod_is_made_again(fields: dict[str, Any], cause: str) -> None:
    decision = decide(one(**fields))
    assert decision is not None
    assert decision.counted
    assert not decision.exhausted
    assert [pod.name for pod in decision.delete] == ["chat-aaaaaaa-0-0"]
    assert decision.cause.startswith("chat-aaaaaaa-0-0: ")
    assert cause in decision.cause


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pending(),
        pending(waiting="Unschedulable: 0/2 nodes are available: 2 Insufficient memory."),
        {"ready": False},
        {"ready": False, "report": None, "report_age": None},
        {"ready": False, "report": make_report(**LOADING)},
        {"ready": False, "report": make_report(phase="restarting", healthy=False, ready=False)},
        {"ready": False, "report": make_report(phase="loading", healthy=False, ready=False)},
        {"ready": False, "report_age": 59.0},
        {"ready": True, "report_age": 4000.0},
        {"phase": "Pending", "ready": False, "report_age": 4000.0},
        {"ready": False, "deleted_at": NOW - 5},
        {"ready": False, "deleted_at": NOW - 5, "report": make_report(phase="draining", ready=False)},
        {"lost": True, "ready": False},
        {"lost": True, "ready": False, "deleted_at": NOW - 60},
        {"waiting": "CrashLoopBackOff: back-off 20s", "ready": False},
        {"waiting": "ImagePullBackOff: not found", "ready": False},
    ],
)
def test_what_is_no_failure_that_a_restart_heals(fields: dict[str, Any]) -> None:
    assert decide(one(**fields)) is None


@pytest.mark.parametrize("fields", [FATAL, HUNG, SILENT, {"restarts": 2, "ready": False}])
def test_a_group_that_never_served_is_not_restarted(fields: dict[str, Any]) -> None:
    """Its revision is bad, or its agents still find each other."""
    report = fields.get("report", make_report()).model_copy(update={"token_seen": False})
    group = make_group(pods=[make_pod(**(fields | {"report": report}))])
    assert decide(known(group, served=False)) is None


def test_an_agent_that_may_succeed_another_time_gets_it_though_it_never_served() -> None:
    """The agent waits in its last phase, so that its message can be read, and would wait for ever."""
    report = GAVE_UP["report"].model_copy(update={"token_seen": False})
    group = known(make_group(pods=[make_pod(ready=False, report=report)]), served=False)
    decision = decide(group)
    assert decision is not None
    assert (len(decision.delete), decision.counted) == (1, True)


@pytest.mark.parametrize(
    ("restarts", "served", "ready", "is_broken"),
    [(0, False, False, False), (1, False, False, False), (2, False, False, True), (2, True, False, False), (5, False, True, False)],
)
def test_a_group_that_never_served_stays_broken_while_it_tries_again(
    restarts: int, served: bool, ready: bool, is_broken: bool
) -> None:
    group = make_group(pods=[make_pod(ready=ready, report=make_report(**LOADING))])
    assert bool(broken_cause(known(group, served=served, restarts=restarts))) == is_broken


def test_a_token_that_was_seen_counts_as_having_served() -> None:
    group = make_group(pods=[make_pod(**FATAL)])
    assert group.previous is None
    assert has_served(group)
    assert decide(group) is not None


def test_a_container_that_its_kubelet_restarted_counts_and_is_left_alone() -> None:
    decision = decide(one(restarts=1, ready=False, termination_message="illegal instruction"))
    assert decision is not None
    assert (decision.counted, decision.delete, decision.wait) == (True, (), 0.0)
    assert decision.cause == "chat-aaaaaaa-0-0: container agent was restarted: illegal instruction"


def test_a_restart_counts_once() -> None:
    group = make_group(pods=[make_pod(restarts=3)])
    assert decide(known(group)) is None
    assert decide(group) is None, "without a record nobody knows when they were"


@pytest.mark.parametrize(
    ("first", "second", "deleted"),
    [
        ({"restarts": 1, "ready": False}, {}, [0, 1]),
        ({}, {"restarts": 1, "ready": False}, [0, 1]),
        (FATAL, {}, [0, 1]),
        ({}, HUNG, [0, 1]),
        ({}, SILENT, [0, 1]),
        ({"phase": "Failed", "ready": False}, {}, [0, 1]),
        # the lost pod is deleted as lost; its peer is recreated with it
        ({"lost": True, "ready": False}, {}, [1]),
        ({}, {"lost": True, "ready": False, "deleted_at": NOW - 40}, [0]),
        # a member that somebody deleted takes the others along
        ({"deleted_at": NOW - 5, "ready": False}, {}, [1]),
        # a member that was replaced unseen
        ({"uid": "another", "created_at": NOW - 3, "ready": False}, {}, [1]),
        ({}, {"uid": "another", "created_at": NOW - 3} | pending(), [0]),
    ],
)
def test_a_gang_restarts_as_a_whole(first: dict[str, Any], second: dict[str, Any], deleted: list[int]) -> None:
    decision = decide(two(first, second))
    assert decision is not None
    assert decision.counted
    assert [pod.number for pod in decision.delete] == deleted


@pytest.mark.parametrize(
    ("first", "second", "deleted"),
    [
        ({}, {"restarts": 1, "ready": False}, []),
        (FATAL, {}, [0]),
        ({}, HUNG, [1]),
        ({}, SILENT, [1]),
        ({"phase": "Failed", "ready": False}, {}, [0]),
    ],
)
def test_nodes_that_know_nothing_of_each_other_are_made_again_alone(
    first: dict[str, Any], second: dict[str, Any], deleted: list[int]
) -> None:
    decision = decide(replace(two(first, second), is_gang=False))
    assert decision is not None and decision.counted
    assert [pod.number for pod in decision.delete] == deleted


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lost": True, "ready": False}, {}),
        ({"deleted_at": NOW - 5, "ready": False}, {}),
        ({"uid": "another", "created_at": NOW - 3, "ready": False}, {}),
        ({"phase": "Failed", "drains": True, "ready": False}, {}),
    ],
)
def test_a_node_that_went_takes_no_other_along_that_knows_nothing_of_it(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert decide(replace(two(first, second), is_gang=False)) is None


@pytest.mark.parametrize(
    ("changes", "is_gang"),
    [
        ({}, False),
        ({"parallelism": {"data": 2}}, False),
        ({"parallelism": {"data": 2, "tensor": 2}, "accelerators": {"perNode": 2}}, False),
        ({"parallelism": {"tensor": 4}, "accelerators": {"perNode": 2}}, True),
        ({"parallelism": {"pipeline": 2}}, True),
        ({"parallelism": {"expert": 2}}, True),
    ],
)
def test_which_nodes_form_a_gang(changes: dict[str, Any], is_gang: bool) -> None:
    world = World(changes)
    world.reconcile()
    observed = world.observe()
    (group,) = read_groups(observed, target="", revisions=()).all
    assert group.is_gang is is_gang
    assert nodes_form_gang(observed, "unknown"), "of a revision that cannot be read"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        (pending(), pending()),
        ({}, pending(uid="uid-chat-aaaaaaa-0-1")),
        # its own restart is under way: all go, or are new
        ({"deleted_at": NOW - 5}, {"deleted_at": NOW - 5}),
        ({"uid": "new", "created_at": NOW - 1, "ready": False}, {"deleted_at": NOW - 5, "ready": False}),
    ],
)
def test_a_gang_that_is_whole_or_already_restarting_is_left_alone(first: dict[str, Any], second: dict[str, Any]) -> None:
    group = two(first, second)
    assert group.previous is not None
    if first.get("uid") == "new":
        group = replace(group, previous=group.previous.model_copy(update={"nodes": []}))
    assert decide(group) is None


def test_a_gang_that_is_made_again_one_by_one_is_left_alone() -> None:
    """The first new pod is recorded before the last old one ended."""
    new = make_pod(number=0, uid="new-0", created_at=NOW - 30, ready=False, report=None)
    late = make_pod(number=1, uid="new-1", created_at=NOW - 1, ready=False, report=None)
    group = make_group(pods=[new, late], nodes=2)
    seen = [GroupNode(pod=new.name, number=0, uid=new.uid)]
    assert decide(replace(group, previous=record(group, nodes=seen))) is None


def test_a_pod_beyond_the_group_may_go() -> None:
    """The group shrinks: its last pod leaves."""
    pods = [make_pod(number=0), make_pod(number=1), make_pod(number=2, deleted_at=NOW - 5, ready=False)]
    group = make_group(pods=pods, nodes=2)
    assert decide(replace(group, previous=record(make_group(nodes=2)))) is None


@pytest.mark.parametrize(("restarts", "seconds"), [(0, 0), (1, 10), (2, 20), (3, 40), (4, 80), (5, 160), (6, 300), (99, 300)])
def test_back_off_doubles(restarts: int, seconds: float) -> None:
    assert backoff(restarts) == seconds


@pytest.mark.parametrize(
    ("ages", "wait"),
    [
        ([], 0.0),
        ([3600.0], 0.0),
        ([11.0], 0.0),
        ([4.0], 6.0),
        ([100.0, 4.0], 16.0),
        ([100.0, 30.0], 0.0),
        ([200.0, 100.0, 4.0], 36.0),
        ([4000.0, 3700.0, 4.0], 6.0),
        ([900.0, 800.0, 700.0, 4.0], 76.0),
    ],
)
def test_restarts_of_one_group_are_spaced(ages: list[float], wait: float) -> None:
    group = one(**FATAL)
    assert group.previous is not None
    times = [rfc3339(NOW - age) for age in ages]
    group = replace(group, previous=group.previous.model_copy(update={"restarted_at": times}))
    decision = decide(group)
    assert decision is not None
    assert decision.wait == wait
    assert bool(decision.delete) == decision.counted == (wait == 0)


@pytest.mark.parametrize(
    ("ages", "budget", "window", "exhausted"),
    [
        ([], 0, 3600, True),
        ([], 1, 3600, False),
        ([100.0], 1, 3600, True),
        ([100.0], 2, 3600, False),
        ([900.0, 800.0], 2, 3600, True),
        ([3601.0, 800.0], 2, 3600, False),
        ([61.0], 1, 60, False),
        ([59.0], 1, 60, True),
        ([5000.0] * 9, 1, 3600, False),
    ],
)
def test_a_budget_ends(ages: list[float], budget: int, window: int, exhausted: bool) -> None:
    group = one(**FATAL)
    assert group.previous is not None
    times = [rfc3339(NOW - age) for age in ages]
    group = replace(group, previous=group.previous.model_copy(update={"restarted_at": times}))
    decision = decide(group, restart_budget=budget, window_seconds=window)
    assert decision is not None
    assert decision.exhausted == exhausted
    assert bool(decision.delete) != exhausted


def test_a_crash_loop_in_place_ends_the_budget_too() -> None:
    fields = {"waiting": "CrashLoopBackOff: back-off 5m0s", "ready": False, "restarts": 9, "report": None}
    group = make_group(pods=[make_pod(**fields)])
    group = known(group, restarted_at=[rfc3339(NOW - age) for age in (500, 400, 300, 200, 100)])
    decision = decide(group)
    assert decision is not None
    assert decision.exhausted
    assert "CrashLoopBackOff" in decision.cause


def test_a_group_that_serves_again_is_no_longer_given_up() -> None:
    group = known(make_group(), restarted_at=[rfc3339(NOW - age) for age in (50, 40, 30, 20, 10)])
    assert decide(group) is None


@pytest.mark.parametrize(("timeout", "limit"), [(1, 60), (20, 60), (21, 63), (100, 300)])
def test_silence(timeout: float, limit: float) -> None:
    assert silence_limit(timeout) == limit


def test_a_slow_engine_may_be_silent_for_longer() -> None:
    assert decide(one(ready=False, report_age=100.0), progress_timeout_seconds=40) is None
    assert decide(one(ready=False, report_age=121.0), progress_timeout_seconds=40) is not None


def test_deletions_name_pod_uid_and_cause_and_do_not_wait_for_streams() -> None:
    decision = decide(one(**FATAL))
    assert decision is not None
    (deletion,) = restart_deletions(decision)
    assert (deletion.kind, deletion.name, deletion.uid) == ("Pod", "chat-aaaaaaa-0-0", "uid-chat-aaaaaaa-0-0")
    assert deletion.grace_seconds == 10
    assert "out of memory" in deletion.why


@pytest.mark.parametrize("fields", [{"lost": True}, {"lost": True, "deleted_at": NOW - 100}])
def test_pods_on_a_lost_node_are_let_go_at_once(fields: dict[str, Any]) -> None:
    (deletion,) = lost_pod_deletions([make_pod(**fields), make_pod(number=1)])
    assert (deletion.name, deletion.grace_seconds) == ("chat-aaaaaaa-0-0", 0)


WAITS = {"chat-aaaaaaa-0": RecoveryDecision(cause="it failed", wait=9.0)}


@pytest.mark.parametrize(
    ("pods", "nodes", "decisions", "numbers"),
    [
        ([make_pod(), make_pod(number=1)], 2, {}, []),
        ([make_pod()], 2, {}, [1]),
        ([], 2, {}, [0, 1]),
        # another one has its name, so it has ended
        ([make_pod(), make_pod(number=1, uid="another")], 2, {}, []),
        # a smaller size has taken it away
        ([make_pod()], 1, {}, []),
        # the record stays as it is, and was asked for already
        ([make_pod()], 2, WAITS, []),
    ],
)
def test_a_pod_that_nobody_sees_any_more_is_deleted_in_case_it_only_lost_its_labels(
    pods: list[Pod], nodes: int, decisions: dict[str, RecoveryDecision], numbers: list[int]
) -> None:
    group = replace(two({}), pods=tuple(pods), nodes=nodes)
    found = [(gone.name, gone.uid, gone.grace_seconds) for gone in unobserved_pod_deletions([group], decisions)]
    assert found == [(f"chat-aaaaaaa-0-{number}", f"uid-chat-aaaaaaa-0-{number}", None) for number in numbers]


@pytest.mark.parametrize(
    ("fields", "is_broken"),
    [
        ({}, False),
        (pending(waiting="Unschedulable: no"), False),
        ({"ready": False}, False),
        ({"ready": False, "restarts": 2}, False),
        ({"ready": False, "restarts": 3}, True),
        ({"ready": True, "restarts": 30}, False),
        ({"ready": False, "waiting": "ContainerCreating"}, False),
        ({"ready": False, "waiting": "OOMKilled"}, False),
        ({"ready": False, "waiting": "CrashLoopBackOff: back-off 10s"}, True),
        ({"ready": False, "waiting": "ImagePullBackOff: no such image"}, None),
        ({"ready": False, "waiting": "ErrImagePull: no such image"}, None),
        ({"ready": False, "waiting": "InvalidImageName: X"}, True),
        ({"ready": False, "waiting": 'CreateContainerConfigError: secret "x" not found'}, None),
        ({"ready": False, "waiting": "CreateContainerError: x"}, None),
        ({"ready": False, "waiting": "RunContainerError: x"}, None),
        (FATAL, True),
        (GAVE_UP, True),
        (HUNG, False),
        ({"ready": False, "report": make_report(**LOADING)}, False),
        (FATAL | {"deleted_at": NOW}, False),
        (FATAL | {"lost": True}, False),
    ],
)
def test_a_group_that_cannot_come_up_by_itself(fields: dict[str, Any], is_broken: bool | None) -> None:
    """`is_broken` None: only once the progress deadline is exceeded."""
    for deadline_exceeded in (False, True):
        cause = broken_cause(make_group(pods=[make_pod(**fields)], deadline_exceeded=deadline_exceeded))
        assert bool(cause) == (deadline_exceeded if is_broken is None else is_broken)
        assert not cause or cause.startswith("chat-aaaaaaa-0-0: ")
