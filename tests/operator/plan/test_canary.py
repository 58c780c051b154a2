"""Canaries: a new revision gets requests step by step, replaces the old one if it is as good, and is rolled back if it is not.

The file is long because each way in which a canary ends has its case here, side by side, in one world.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starling_agent.contract.router_report import FIRST_TOKEN_SECONDS, CanaryNotice, CanaryReport, RevisionCounts, RouterReport
from starling_crds.layout import GroupLayout
from starling_crds.v1alpha1.lifecycle import CanarySpec, CanaryStep
from starling_crds.v1alpha1.status import CanaryStatus
from starling_operator.plan.canary import canary_hash
from starling_operator.plan.canary_gates import Judgement, judge, median_first_token
from starling_operator.plan.canary_notice import notice_deletion
from starling_operator.plan.observed import RouterPod
from starling_operator.plan.readiness import ExpectedReports, unready_reason

from tests.operator.plan.building import HASH, make_group, make_pod, make_report
from tests.operator.plan.world import BAD, OTHER, World, names, settled

STEPS = [{"weight": 20, "seconds": 60}, {"weight": 50, "seconds": 90}]
CANARY: dict[str, Any] = {"router": {"replicas": 1}, "replicas": 3, "rollout": {"canary": {"steps": STEPS}}}
WRONG = {"requests": 100, "errors": 10}
GOOD = {"requests": 900, "errors": 1}
AT_STEP = CanaryStatus(revision="new", stable="old", step=1, weight=5, since="2026-11-27T12:00:00Z")


def counts(seconds: float, answers: int = 40) -> RevisionCounts:
    """Counts of answers whose first piece came after so long."""
    return RevisionCounts(
        requests=answers,
        first_tokens=[answers if seconds <= bound else 0 for bound in FIRST_TOKEN_SECONDS],
        first_tokens_all=answers,
    )


def router(report: CanaryReport | None, age: float = 1.0, **fields: Any) -> RouterPod:
    found = RouterReport(version=1, incarnation="i", open=0, held=0, canary=report)
    given: dict[str, Any] = {"name": "r", "uid": "r", "is_running": True, "report": found, "report_age": age}
    return RouterPod(**(given | fields))


def judged(
    *reports: CanaryReport | RouterPod | None,
    tokens: bool = True,
    must_compare: bool = False,
    is_over: bool = True,
    percent: float = 1.0,
) -> Judgement:
    pods = [
        replace(each, uid=str(number)) if isinstance(each, RouterPod) else router(each, uid=str(number))
        for number, each in enumerate(reports)
    ]
    return judge(
        pods, AT_STEP, CanaryStep(weight=5, max_error_percent=percent), tokens=tokens, must_compare=must_compare, is_over=is_over
    )


def seen(
    stable: dict[str, int] | RevisionCounts = GOOD, tried: dict[str, int] | RevisionCounts = GOOD, **fields: Any
) -> CanaryReport:
    return CanaryReport(canary="new", attempt=AT_STEP.since, **({"stable": stable, "tried": tried} | fields))


OTHER_TOKENS: dict[str, Any] = {"compared": 40, "differing": 1, "difference": "token 7 is 12, not 13"}


@pytest.mark.parametrize(
    ("reports", "failed"),
    [
        ((seen(),), ""),
        ((seen(tried={"requests": 100, "errors": 1}),), ""),
        ((seen(tried={"requests": 100, "errors": 2}),), "2.0 % of 100 requests failed (0.1 % of 900 at the old revision)"),
        ((seen({"requests": 100, "errors": 1}, {"requests": 100, "errors": 2}),), ""),
        ((seen(WRONG, WRONG),), ""),
        ((seen(tried={"requests": 0, "errors": 2}),), "100.0 % of 0 requests failed"),
        # summed over routers
        ((seen(tried={"requests": 9, "errors": 1}), seen(tried={"requests": 9, "errors": 1})), "11.1 % of 18 requests failed"),
        ((seen(tried={"requests": 10, "errors": 2}), seen(tried={"requests": 990})), ""),
        # times
        ((seen(counts(0.3), counts(0.75)),), ""),
        ((seen(counts(0.3), counts(1.5)),), "the median time to a first token is 1.2 s (0.3 s at the old revision)"),
        ((seen(counts(0.3, 19), counts(1.5)),), ""),
        ((seen(counts(0.3), counts(1.5, 19)),), ""),
        ((seen(counts(0.3, 10), counts(1.5, 10)), seen(counts(0.3, 10), counts(1.5, 10))), "the median time"),
        ((seen(counts(0.024), counts(0.026)),), ""),
        # tokens
        ((seen(**OTHER_TOKENS),), "1 of 40 compared requests got other tokens (token 7 is 12, not 13)"),
        # what was said of another revision, before the step, or long ago
        ((seen(tried=WRONG).model_copy(update={"canary": "other"}),), ""),
        ((seen(tried=WRONG).model_copy(update={"attempt": "2026-11-27T11:00:00Z"}),), ""),
        ((router(seen(tried=WRONG), age=100.0),), ""),
    ],
)
def test_a_gate_fails_by_what_routers_report(reports: tuple[CanaryReport | RouterPod, ...], failed: str) -> None:
    found = judged(*reports).failed
    assert found.startswith(failed) and bool(found) == bool(failed)


def test_times_count_once_a_step_is_over() -> None:
    """The first answers of a new revision find no prefix in its cache."""
    slow = seen(counts(0.3), counts(1.5))
    assert not judged(slow, is_over=False).failed and judged(slow).failed
    world, _ = tried()
    world.fares = FARES["slow"]
    world.tick()
    world.reconcile()
    assert weight(world) == 20 and world.condition("Ready") == ("False", "Canary")


def test_tokens_that_differ_count_only_where_they_are_compared() -> None:
    assert not judged(seen(**OTHER_TOKENS), tokens=False).failed


@pytest.mark.parametrize(
    ("reports", "waits"),
    [
        ((), "no router runs that could say how it fares"),
        ((seen(), None), "router r has yet to say how it fares"),
        ((seen(), router(seen(), age=100.0)), "router r has yet to say how it fares"),
        ((seen(), router(None, is_going=True)), ""),
        ((seen(), router(None, is_running=False)), ""),
        # one error by chance rolls nothing back, and passes nothing
        ((seen(tried={"requests": 9, "errors": 1}),), "11.1 % of 9 requests failed"),
        ((seen(tried={"requests": 99, "errors": 1}),), ""),
        # what was to go there and went elsewhere
        ((seen(tried={"placed": 20, "requests": 9}),), "it answered 9 of 20 requests that were to go to it"),
        ((seen(tried={"placed": 20, "requests": 10}),), ""),
        ((seen(tried={"placed": 19}),), ""),
        ((seen(tried={"placed": 10}), seen(tried={"placed": 10})), "it answered 0 of 20 requests"),
    ],
)
def test_a_step_waits_for_what_is_not_known(reports: tuple[CanaryReport | RouterPod | None, ...], waits: str) -> None:
    found = judged(*reports)
    assert found.waits.startswith(waits) and bool(found.waits) == bool(waits) and not found.failed


def test_what_more_requests_do_not_help_keeps_no_step_for_ever() -> None:
    """A wait for a router, for what an error was, or for requests to compare is no fault of the canary."""
    refused = seen(tried={"placed": 20, "requests": 9, "errors": 1})
    assert "requests failed" in judged(refused).waits and "answered 9 of 20" in judged(refused).stuck
    assert judged(refused, None).waits and not judged(refused, None).stuck
    assert not judged(seen(tried={"requests": 9, "errors": 1})).stuck
    few, many = (seen({"requests": placed, "placed": placed}) for placed in (99, 100))
    assert judged(few, must_compare=True).waits and not judged(few, must_compare=True).stuck
    assert judged(many, must_compare=True).stuck == judged(many, must_compare=True).waits and judged(many) == Judgement()


def test_one_error_of_many_requests_holds_no_step_for_ever() -> None:
    """A gate of 0 % holds it while one error may be the first of several."""
    few, many = (seen({"requests": 9}, {"requests": requests, "errors": 1}) for requests in (999, 1000))
    assert "requests failed" in judged(few, percent=0).waits and judged(many, percent=0) == Judgement()


def test_a_step_that_is_to_compare_tokens_waits_for_some() -> None:
    assert judged(seen(), must_compare=True).waits == "no tokens were compared yet, and spec.rollout.canary.compare is tokens"
    assert judged(seen(compared=1), must_compare=True) == judged(seen()) == Judgement()
    world, _ = tried(edit=OTHER | {"rollout": {"canary": {"compare": "tokens"}}})
    world.tick(100)
    world.reconcile()
    assert at_step(1)(world) and "no tokens were compared yet" in world.message()
    world.fares = {"compared": 1}
    until(world, at_step(2))


@pytest.mark.parametrize(("seconds", "median"), [(0.001, 0.01875), (0.3, 0.3), (0.75, 0.6), (90.0, 60.0)])
def test_a_median_is_known_to_a_bucket(seconds: float, median: float) -> None:
    assert median_first_token(counts(seconds)) == pytest.approx(median)


def serving(world: World, revision: str) -> list[str]:
    return [name for name in world.available() if f"-{revision}-" in name]


def until(world: World, done: Callable[[World], bool], seconds: float = 2.0) -> None:
    """Reconciles every so many seconds."""
    for _ in range(100):
        world.reconcile()
        if done(world):
            return
        world.tick(seconds)
    raise AssertionError(f"not in time: {world.message()} {world.status.canary}")


def at_step(step: int) -> Callable[[World], bool]:
    return lambda world: world.status.canary is not None and bool(world.status.canary.step == step)


def stored(world: World) -> CanaryNotice | None:
    """Returns what a router finds that starts now."""
    live = world.children.get(("ConfigMap", "chat-router"))
    return None if live is None else CanaryNotice.model_validate_json(live["data"]["canary.json"])


def weight(world: World) -> int | None:
    return None if world.told.canary is None else world.told.canary.weight


def tried(changes: dict[str, Any] | None = None, edit: dict[str, Any] = OTHER, step: int = 1) -> tuple[World, str]:
    """Returns a service whose canary is at a step, and the revision that serves."""
    world = settled(CANARY | (changes or {}))
    old = world.status.revision.current
    world.edit(edit)
    until(world, at_step(step))
    return world, old


def test_a_new_revision_gets_requests_step_by_step_and_then_replaces_the_old_one() -> None:
    world = settled(CANARY)
    old = world.status.revision.current
    uids = {member.uid for member in world.pods}
    world.edit(OTHER)
    seen = list[Any]()
    while not seen or world.status.canary is not None:
        world.reconcile()
        assert stored(world) == world.told.canary
        new = world.status.revision.target
        picture = (weight(world), len(world.sets()) - len(names_of(world, old)), len(names_of(world, old)))
        seen += [] if seen and seen[-1] == picture else [picture]
        if world.status.canary is not None and world.status.canary.phase == "trying":
            assert {member.uid for member in world.pods if member.revision == old} == uids, "all pods of the old one stay"
            assert world.condition("Ready") == ("False", "Canary") and world.condition("Available")[0] == "True"
        world.tick(2)
    assert seen[:4] == [(0, 0, 3), (0, 1, 3), (20, 1, 3), (20, 2, 3)] and seen[4] == (50, 2, 3) and seen[5][0] is None
    assert [event.reason for event in world.events if "Canary" in event.reason] == [
        "CanaryStarted",
        "CanaryStep",
        "CanaryStep",
        "CanaryPassed",
    ]
    world.settle()
    assert world.condition("Ready") == ("True", "Serving") and names(world) == names_of(world, new) and len(names(world)) == 3


def names_of(world: World, revision: str) -> list[str]:
    return [name for name in names(world) if f"-{revision}-" in name]


FARES: dict[str, dict[str, Any]] = {
    "errors": {"stable": GOOD, "tried": WRONG},
    "slow": {"stable": counts(0.1), "tried": counts(3.0)},
    "tokens": OTHER_TOKENS,
}


@pytest.mark.parametrize(
    ("fares", "why"), [("errors", "requests failed"), ("slow", "time to a first token"), ("tokens", "other tokens")]
)
@pytest.mark.parametrize("step", [1, 2])
def test_a_worse_revision_is_rolled_back(fares: str, why: str, step: int) -> None:
    world, old = tried(step=step)
    new, uids = world.status.revision.target, {member.uid for member in world.pods if member.revision == old_of(world)}
    world.tick(STEPS[step - 1]["seconds"])
    world.fares = FARES[fares]
    world.reconcile()
    assert weight(world) == 0, "routers hear it at once"
    world.settle()
    assert {member.uid for member in world.pods} == uids and names(world) == names_of(world, old) and weight(world) is None
    assert world.condition("Ready") == ("False", "CanaryRolledBack") and world.condition("Stalled")[0] == "True"
    assert f"revision {new} was rolled back at step {step} of 2" in world.message() and why in world.message()
    assert world.event_reasons("CanaryRolledBack") == ["CanaryRolledBack"]
    assert (world.status.revision.current, world.status.revision.target) == (old, new)


def old_of(world: World) -> str:
    assert world.status.canary is not None
    return world.status.canary.stable


@pytest.mark.parametrize("edit", [{"model": {"source": BAD}}, {"parallelism": {"tensor": 2}, "accelerators": {"perNode": 2}}])
def test_a_revision_that_does_not_come_up_is_rolled_back(edit: dict[str, Any]) -> None:
    world = settled(CANARY)
    world.node_slots, before = (40 if "model" in edit else 3), names(world)
    world.edit(edit)
    until(world, lambda world: world.condition("Ready")[1] == "CanaryRolledBack", 50)
    assert "was rolled back before its first step" in world.message()
    assert ("names no architecture" if "model" in edit else "made no progress for over 600 s") in world.message()
    world.node_slots = 40
    world.settle()
    assert names(world) == before and len(world.available()) == 3


def test_a_revision_that_was_rolled_back_is_tried_again_only_after_an_edit() -> None:
    world, old = tried()
    world.fares = FARES["errors"]
    world.tick()
    world.settle()
    world.fares = {}
    world.edit({"replicas": 4})
    world.settle()
    assert names(world) == names_of(world, old) and len(world.available()) == 4, "the old one scales meanwhile"
    world.edit({"rollout": {"canary": {"steps": [{"weight": 1, "seconds": 60}]}}})
    until(world, at_step(1))
    assert weight(world) == 1
    world.fares = FARES["errors"]
    world.tick()
    world.settle()
    assert world.condition("Stalled")[0] == "True"
    world.edit({"rollout": {"canary": None}})
    world.settle()
    assert not names_of(world, old) and world.condition("Ready") == ("True", "Serving") and world.status.canary is None


def test_what_routers_are_told_is_deleted_once() -> None:
    """A finalizer may hold the ConfigMap for long."""
    world, _ = tried()
    live = world.children["ConfigMap", "chat-router"]
    assert [gone.name for gone in notice_deletion(world.observe(), None)] == ["chat-router"]
    live["metadata"]["deletionTimestamp"] = "2026-11-27T12:00:00Z"
    assert [*notice_deletion(world.observe(), None)] == []


@pytest.mark.parametrize(
    ("fields", "digest"),
    [
        ({"stickyBy": "key"}, "8ba36f8ceca6bdc4"),
        ({"stickyBy": "none"}, "8c7d27b5d6230d81"),
        ({"stickyBy": "session", "compare": "slo"}, "ef623ae1b3d34e2e"),
        ({}, "63f70b9cfbdd37b8"),
    ],
)
def test_digests_in_statuses_stay_true(fields: dict[str, Any], digest: str) -> None:
    """Otherwise a newer operator would try anew what was rolled back. `key` was the default then, and is stored in specs."""
    assert canary_hash(CanarySpec.model_validate({"steps": STEPS[:1], **fields})) == digest


@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_edit_supersedes_a_canary(step: int) -> None:
    world, old = tried(step=step)
    first = world.status.revision.target
    world.edit({"engine": {"blockSize": 8}})
    world.reconcile()
    second = world.status.revision.target
    assert first != second and not names_of(world, first) and len(names_of(world, old)) == 3
    assert world.told.canary is not None and (world.told.canary.canary, world.told.canary.weight) == (second, 0)
    world.settle()
    assert names(world) == names_of(world, second) and world.condition("Ready") == ("True", "Serving")


def take_back(world: World) -> None:
    world.changes.pop("engine")
    world.generation += 1


@pytest.mark.parametrize("rolled_back", [False, True])
def test_going_back_to_the_old_revision_ends_a_canary_at_once(rolled_back: bool) -> None:
    world, old = tried()
    if rolled_back:
        world.fares = FARES["errors"]
        world.tick()
        world.reconcile()
    take_back(world)
    world.reconcile()
    assert names(world) == names_of(world, old) and len(names(world)) == 3
    while any(member.revision != old for member in world.pods):
        assert weight(world) == 0, "its pods serve until they have drained"
        assert not world.message().startswith("revision") and world.condition("Stalled")[0] == "False"
        world.tick()
        world.reconcile()
    world.settle()
    assert weight(world) is None and world.status.canary is None and world.condition("Ready") == ("True", "Serving")


def test_a_canary_that_was_taken_back_may_be_tried_anew_while_its_pods_drain() -> None:
    world, old = tried()
    take_back(world)
    world.reconcile()
    world.edit(OTHER)
    world.reconcile()
    assert world.status.canary is not None and (world.status.canary.phase, world.status.canary.step) == ("trying", 0)
    until(world, at_step(1))
    assert len(names_of(world, old)) == 3


def test_going_back_after_it_passed_replaces_its_groups_at_once() -> None:
    """The old revision needs no try: its groups serve."""
    world, old = tried()
    until(world, lambda world: world.status.canary is not None and world.status.canary.phase == "passed")
    kept = {member.uid for member in world.pods if member.revision == old}
    take_back(world)
    world.reconcile()
    assert world.status.canary is None and len(names_of(world, old)) == 3
    world.settle()
    assert kept <= {member.uid for member in world.pods} and names(world) == names_of(world, old)
    assert world.event_reasons("CanaryStarted") == ["CanaryStarted"]


def test_a_pause_holds_a_canary_at_its_step_and_its_gates_still_count() -> None:
    world, old = tried()
    world.edit({"rollout": {"pause": True}})
    for _ in range(5):
        world.reconcile()
        world.tick(100)
    assert weight(world) == 20 and "spec.rollout.pause holds it" in world.message()
    other = replace(world, status=world.status, events=[], pods=list(world.pods), children=dict(world.children))
    other.fares = FARES["tokens"]
    other.settle()
    assert other.condition("Ready")[1] == "CanaryRolledBack"
    world.edit({"rollout": {"pause": False}})
    until(world, at_step(2))
    assert len(names_of(world, old)) == 3


def test_a_router_that_says_nothing_holds_the_step() -> None:
    world, _ = tried({"router": {"replicas": 2}})
    world.mute_routers = 1
    world.tick(100)
    decision = world.reconcile()
    assert at_step(1)(world) and "router chat-router-1 has yet to say" in world.message()
    assert decision.requeue_after is not None and decision.requeue_after < 10
    world.mute_routers = 0
    until(world, at_step(2))


def test_a_canary_gets_groups_once_each_router_knows_of_it() -> None:
    """One that does not would send requests to them by load."""
    world = settled(CANARY | {"router": {"replicas": 2}})
    world.mute_routers = 1
    world.edit(OTHER)
    for _ in range(5):
        decision = world.reconcile()
        world.tick()
    assert len(names(world)) == 3 and "router chat-router-1 has yet to say how it fares" in world.message()
    assert decision.requeue_after is not None and decision.requeue_after < 10
    world.mute_routers = 0
    until(world, at_step(1))


PLACED: dict[str, Any] = {"placed": 100, "requests": 100}
COMPARED = {"rollout": {"canary": {"compare": "tokens"}}}


@pytest.mark.parametrize(
    ("edit", "fares", "why"),
    [
        ({}, {"tried": {"placed": 40, "requests": 3}}, "it answered 3 of 40 requests that were to go to it"),
        (COMPARED, {"stable": PLACED}, "no tokens were compared yet"),
    ],
)
def test_a_canary_that_requests_do_not_bring_on_is_rolled_back(edit: dict[str, Any], fares: dict[str, Any], why: str) -> None:
    world, old = tried(edit=OTHER | edit)
    world.fares = fares
    world.tick(60 + 590)
    decision = world.reconcile()
    assert at_step(1)(world) and weight(world) == 20 and why in world.message()
    assert decision.requeue_after is not None and decision.requeue_after < 10
    world.tick(20)
    world.settle()
    assert names(world) == names_of(world, old) and world.condition("Ready") == ("False", "CanaryRolledBack")
    assert why in world.message() and "its step made no progress for over 600 s" in world.message()


@pytest.mark.parametrize(
    ("edit", "fares", "mute"),
    [
        ({"rollout": {"pause": True}}, {"tried": {"placed": 40, "requests": 3}}, 0),
        ({"router": {"replicas": 2}}, {"tried": {"placed": 40, "requests": 3}}, 1),
        (COMPARED, {}, 0),
        (COMPARED, {"stable": {"placed": 99, "requests": 99}}, 0),
    ],
)
def test_a_pause_a_silent_router_and_too_few_requests_hold_a_step_for_ever(
    edit: dict[str, Any], fares: dict[str, Any], mute: int
) -> None:
    world, _ = tried(edit=OTHER | edit)
    world.fares, world.mute_routers = fares, mute
    for _ in range(3):
        world.tick(1000)
        world.reconcile()
    assert at_step(1)(world) and weight(world) == 20 and world.condition("Ready") == ("False", "Canary")


def test_counts_begin_anew_with_each_step_and_each_try() -> None:
    world, old = tried()
    begun = [told_attempt(world)]
    until(world, at_step(2))
    begun += [told_attempt(world)]
    world.tick()
    world.edit({"suspend": True})
    world.settle()
    begun += [told_attempt(world)]
    world.edit({"suspend": False})
    until(world, at_step(1))
    begun += [told_attempt(world)]
    world.fares = FARES["errors"]
    world.tick()
    world.reconcile()
    assert told_attempt(world) == begun[-1] and weight(world) == 0
    world.reconcile()
    world.tick()
    world.fares = {}
    world.edit({"rollout": {"canary": {"steps": STEPS[:1]}}})
    world.reconcile()
    assert weight(world) == 0 and any(member.revision != old for member in world.pods), "the first try's pods drain"
    begun += [told_attempt(world)]
    assert len(set(begun)) == len(begun) == 5


def told_attempt(world: World) -> str:
    assert world.told.canary is not None
    return world.told.canary.attempt


def test_a_canary_begins_once_clients_reach_routers() -> None:
    world = settled({"replicas": 2})
    world.edit(CANARY | OTHER | {"replicas": 2})
    world.reconcile()
    assert len(names(world)) == 2 and "waits for a router" in world.message()
    until(world, at_step(1))


@pytest.mark.parametrize("seed", range(3))
def test_an_operator_that_dies_at_any_write_of_any_step_forgets_nothing(seed: int) -> None:
    """Each decision is cut short once, after some writes, and then another operator decides."""
    world, dice = settled(CANARY), random.Random(seed)
    old, weights = world.status.revision.current, list[int | None]()
    world.edit(OTHER)
    for _ in range(100):
        for writes in (dice.randrange(25), None):
            world.reconcile(writes)
            weights += [] if weights and weights[-1] == weight(world) else [weight(world)]
        if weights[-1] is None:
            break
        world.tick(5)
        world.fares = FARES["tokens"] if at_step(2)(world) else {}
    assert weights[weights.index(0) :] == [0, 20, 50, 0, None] and names(world) == names_of(world, old)
    world.fares = {}
    world.settle()
    assert names(world) == names_of(world, old) and world.condition("Ready")[1] == "CanaryRolledBack"


@pytest.mark.parametrize(
    ("base", "edit", "compare", "exact"),
    [
        ({}, {"engine": {"blockSize": 32}}, "tokens", False),
        ({"model": {"dtype": "float32"}}, {"engine": {"blockSize": 32}}, "tokens", True),
        ({}, {"image": "registry.example/starling-agent:2"}, "tokens", False),
        ({}, {"parallelism": {"tensor": 2}}, "tokens", False),
        ({}, {"model": {"source": "hf://org/other"}}, "slo", False),
        ({}, {"model": {"dtype": "float32"}}, "slo", False),
        ({}, {"kvCache": {"dtype": "fp8"}}, "slo", False),
        ({}, {"engine": {"extraArgs": {"quantization": "fp8"}}}, "slo", False),
        ({}, {"model": {"source": "hf://org/other"}, "rollout": {"canary": {"compare": "tokens"}}}, "tokens", False),
        ({}, {"engine": {"blockSize": 32}, "rollout": {"canary": {"compare": "slo"}}}, "slo", False),
    ],
)
def test_tokens_are_compared_where_they_should_be_the_same(
    base: dict[str, Any], edit: dict[str, Any], compare: str, exact: bool
) -> None:
    world, _ = tried(base, edit)
    assert world.told.canary is not None and (world.told.canary.compare, world.told.canary.exact) == (compare, exact)


@pytest.mark.parametrize(("source", "compare"), [("hf://org/model", "slo"), (f"hf://org/model@{'c0' * 20}", "tokens")])
def test_files_of_no_commit_are_compared_once_both_are_known(source: str, compare: str) -> None:
    world, _ = tried({"model": {"source": source}}, step=0)
    until(world, lambda world: len(names(world)) == 4)
    assert world.told.canary is not None and world.told.canary.compare == compare
    until(world, at_step(1))
    assert world.told.canary.compare == "tokens"


def test_the_old_revision_scales_and_is_evicted_as_ever() -> None:
    world, old = tried()
    world.edit({"replicas": 5, "rollout": {"maxSurge": 0, "maxUnavailable": 1}})
    until(world, lambda world: len(serving(world, old)) == 5)
    assert len(names(world)) == 6 and at_step(1)(world)
    victim = world.members(names_of(world, old)[0])[0]
    world.cordon(victim)
    world.evict(victim)
    until(world, lambda world: victim.group not in names(world) and len(serving(world, old)) == 5)
    canary = world.members(next(name for name in names(world) if old not in name))[0]
    world.cordon(canary)
    until(world, lambda world: canary.group not in names(world) and len(world.available()) == 6)
    assert at_step(1)(world) and len(serving(world, old)) == 5


def test_a_refused_spec_keeps_a_canary_without_requests() -> None:
    """Nobody judges it meanwhile."""
    world, _ = tried()
    world.edit({"engine": {"extraArgs": {"no_such": 1}}})
    world.reconcile()
    assert world.condition("Ready")[1] == "InvalidSpec" and weight(world) == 0 and stored(world) == world.told.canary
    assert world.status.canary is not None and (world.status.canary.step, world.status.canary.weight) == (1, 0)
    world.changes["engine"].pop("extraArgs")
    world.generation += 1
    world.reconcile()
    assert at_step(1)(world) and weight(world) == 20


@pytest.mark.parametrize(("edited", "first"), [(10, 10), (45, 20)])
def test_an_edited_weight_counts_at_once_or_once_its_groups_serve(edited: int, first: int) -> None:
    world, _ = tried()
    world.edit({"rollout": {"canary": {"steps": [{"weight": edited, "seconds": 600}, STEPS[1]]}}})
    world.reconcile()
    assert weight(world) == first
    until(world, lambda world: weight(world) == edited)
    assert at_step(1)(world) and len(world.available()) == 3 + math.ceil(3 * edited / 100)


def test_a_suspended_canary_begins_anew() -> None:
    world, old = tried()
    new = world.status.revision.target
    world.edit({"suspend": True})
    world.settle()
    assert names(world) == [] and weight(world) == 0
    world.edit({"suspend": False})
    until(world, at_step(1))
    assert len(names_of(world, old)) == 3 and len(names_of(world, new)) == 1


def test_without_groups_that_have_served_there_is_nothing_to_try_a_revision_against() -> None:
    world = World(CANARY | {"model": {"source": BAD}})
    for _ in range(20):
        world.reconcile()
        world.tick()
    world.edit({"model": {"source": "hf://org/good"}})
    world.settle()
    assert world.condition("Ready") == ("True", "Serving") and not world.event_reasons("CanaryStarted")


def test_a_canary_lets_no_eviction_take_the_group_that_serves() -> None:
    world, _ = tried({"replicas": 1})
    assert len(world.available()) == 2 and world.evictable() <= 0


def test_a_service_without_groups_gets_a_new_revision_without_a_canary() -> None:
    world = settled(CANARY | {"replicas": 0})
    world.edit({"replicas": 1})
    world.settle()
    world.edit({"replicas": 0})
    world.settle()
    world.edit(OTHER | {"replicas": 2})
    world.settle()
    assert world.condition("Ready") == ("True", "Serving") and not world.event_reasons("CanaryStarted")


def test_a_canarys_group_is_ready_by_what_its_agents_report() -> None:
    group = make_group(target=False, is_canary=True, pods=[make_pod(report=make_report(token_seen=False))])
    expected = ExpectedReports(HASH, GroupLayout(tensor=1, pipeline=1, data=1))
    assert "no token came through its endpoint" in unready_reason(group, expected)
