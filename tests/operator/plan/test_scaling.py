"""Scaling to zero and back: what routers report decides it, the status remembers it, and spec.replicas stays as it is."""

from dataclasses import replace
from typing import Any

import pytest
from starling_agent.contract.report import Progress
from starling_agent.contract.router_report import RouterReport, ServiceNotice
from starling_crds.v1alpha1.status import Condition, InferenceServiceStatus, ScalingStatus
from starling_operator.plan.observed import Observed, RouterPod
from starling_operator.plan.plan import plan
from starling_operator.plan.revision import spec_hash
from starling_operator.plan.scaling import BELIEVED_SECONDS, Scale, wanted_scale
from starling_operator.plan.timestamps import rfc3339

from tests.operator.plan.building import NOW, make_observed, make_pod, make_report, make_service, make_spec
from tests.operator.plan.world import World

IDLE: dict[str, Any] = {"router": {}, "scaling": {"idleSeconds": 60}}
SERVES = ScalingStatus(wanted=2, since=rfc3339(NOW - 1000), started_at=rfc3339(NOW - 900), start_seconds=100)
SLEEPS: dict[str, Any] = {"router": {}, "scaling": {"idleSeconds": 60, "standby": "asleep"}}
AT_ZERO = SERVES.model_copy(update={"wanted": 0, "message": "no request for 60 s"})


def router(quiet: float | None = 100.0, *, held: int = 0, **fields: Any) -> RouterPod:
    """A router that was asked just now."""
    report = RouterReport(version=1, incarnation="i", open=held, held=held, quiet_seconds=None if held else quiet)
    given = {"name": "chat-router-a", "uid": "a", "address": "10.0.1.1", "is_running": True, "report": report}
    return RouterPod(**(given | fields))


def seen(*routers: RouterPod, last: ScalingStatus | None = SERVES, serves_for: float | None = 900.0, **changes: Any) -> Observed:
    """Returns a service of two groups that has served for so long; None: it does not."""
    available = Condition(type="Available", status="False" if serves_for is None else "True", reason="x")
    if serves_for is not None:
        available = available.model_copy(update={"last_transition_time": rfc3339(NOW - serves_for)})
    service = make_service(make_spec({"replicas": 2} | IDLE | changes))
    status = InferenceServiceStatus(scaling=last, conditions=[available])
    return make_observed(service.spec, service=replace(service, status=status), routers=routers)


def decided(observed: Observed) -> Scale:
    assert observed.service.spec is not None
    return wanted_scale(observed, observed.service.spec)


@pytest.mark.parametrize(
    ("routers", "groups", "due"),
    [
        ((), 2, None),
        ((router(60),), 0, None),
        ((router(59),), 2, 1.0),
        ((router(10, report_age=50),), 0, None),
        ((router(100), router(20)), 2, 40.0),
        ((router(100), router(held=1)), 2, None),
        ((router(100), router(None)), 2, None),
        ((router(100), router(report=None)), 2, None),
        ((router(100, report_age=BELIEVED_SECONDS + 1),), 2, None),
        ((router(100), router(report=None, is_running=False)), 0, None),
        ((router(100), router(report=None, is_going=True)), 0, None),
        ((router(100), router(held=1, is_going=True)), 2, None),
        ((router(100), router(held=1, is_going=True, report_age=BELIEVED_SECONDS + 1)), 0, None),
        ((router(100, is_going=True),), 2, None),
    ],
)
def test_groups_go_once_all_routers_say_that_there_was_no_request(
    routers: tuple[RouterPod, ...], groups: int, due: float | None
) -> None:
    scale = decided(seen(*routers))
    assert (scale.groups, scale.due) == (groups, due)
    assert scale.status is not None and scale.status.wanted == groups


def test_groups_stay_while_they_work_or_a_rollout_goes_on() -> None:
    observed = seen(router(100))
    assert observed.service.spec is not None
    assert wanted_scale(observed, observed.service.spec, rolls=True).groups == 2
    working = make_pod(report=make_report(open_streams=1))
    assert decided(replace(observed, pods=(working,))).groups == 2


def test_the_time_counts_from_when_a_group_serves() -> None:
    assert decided(seen(router(900), serves_for=59)).groups == 2
    assert decided(seen(router(900), serves_for=60)).groups == 0
    never = decided(seen(router(9000), serves_for=None))
    assert (never.groups, never.due) == (2, None), "one that does not come up stays"


@pytest.mark.parametrize(
    ("routers", "replicas", "groups"),
    [
        ((router(),), 2, 0),
        ((), 2, 0),
        ((router(None),), 2, 2),
        ((router(), router(held=1)), 2, 2),
        ((router(held=200),), 3, 3),
        ((router(held=1),), 0, 1),
        ((router(held=1, report_age=BELIEVED_SECONDS + 1),), 2, 0),
    ],
)
def test_one_request_wakes_as_many_groups_as_the_spec_has(routers: tuple[RouterPod, ...], replicas: int, groups: int) -> None:
    scale = decided(seen(*routers, last=AT_ZERO, serves_for=None, replicas=replicas))
    assert scale.groups == groups and scale.status is not None
    assert scale.status.since == (rfc3339(NOW) if groups else AT_ZERO.since)
    assert scale.status.start_seconds == 100, "clients hear how long it took the last time"


def test_a_mute_router_is_named() -> None:
    scale = decided(seen(router(100), router(report=None, name="chat-router-b")))
    assert scale.status is not None
    assert scale.status.message == "all groups stay: router chat-router-b does not say whether there are requests"


def test_a_start_is_timed_once() -> None:
    woken = SERVES.model_copy(update={"started_at": "", "start_seconds": 7})
    for last, serves_for, took in ((woken, 990.0, 10), (SERVES, 10.0, 100), (None, 10.0, 0)):
        scale = decided(seen(router(0), last=last, serves_for=serves_for))
        assert scale.status is not None and (scale.status.start_seconds, bool(scale.status.started_at)) == (took, True)


def test_a_suspended_service_is_never_woken_and_one_without_idle_seconds_is_as_it_was() -> None:
    asked = router(held=5)
    assert decided(seen(asked, last=AT_ZERO, suspend=True)) == Scale(0)
    assert decided(seen(asked, last=AT_ZERO, scaling={})) == Scale(2)
    assert decided(seen(asked, last=None, scaling={}, replicas=0)) == Scale(0)


def settled(changes: dict[str, Any]) -> World:
    world = World(IDLE | changes)
    world.settle()
    return world


def until_answered(world: World) -> None:
    for _ in range(50):
        world.reconcile()
        world.tick()
        if not world.open:
            return
    raise AssertionError(f"{world.open} requests still wait: {world.message()}")


def test_it_goes_to_zero_and_requests_that_trickle_in_wake_it_each_once(request: pytest.FixtureRequest) -> None:
    cycles = 40 if request.config.getoption("--whole") else 5
    world = settled({})
    assert world.condition("Ready") == ("False", "Idle") and world.condition("Reconciling")[0] == "False"
    assert world.message() == "no request for 60 s; no group runs; the next request wakes it"
    assert world.sets() == [] and world.status.replicas == 0
    for number in range(1, cycles + 1):
        world.ask()
        until_answered(world)
        assert len(world.sets()) == 1 and world.answered == number
        assert world.event_reasons("Woken") == ["Woken"] * number
        world.settle()
        assert world.sets() == [] and world.event_reasons("Idle") == ["Idle"] * (number + 1)
    assert world.spec.replicas == 1 and world.generation == 1, "nobody wrote the spec"


def test_two_hundred_requests_at_once_are_one_scale_up() -> None:
    world = settled({"replicas": 3})
    world.ask(200)
    until_answered(world)
    for _ in range(10):
        world.reconcile()
        world.tick()
    assert world.answered == 200 and len(world.sets()) == len(world.available()) == 3
    assert world.event_reasons("Woken", "Idle") == ["Idle", "Woken"] and world.condition("Ready") == ("True", "Serving")


def test_a_service_of_no_replicas_is_woken_by_a_request_and_by_nothing_else() -> None:
    world = settled({"replicas": 0})
    assert world.message() == "spec.replicas is 0; no group runs; the next request wakes it" and not world.events
    world.edit({"drain": {"seconds": 7}})
    world.settle()
    assert world.sets() == []
    world.edit({"replicas": 2})
    world.settle()
    assert world.message() == "no request has come yet; no group runs; the next request wakes it" and world.sets() == []
    world.edit({"replicas": 0})
    world.ask()
    until_answered(world)
    assert len(world.sets()) == 1 and world.changes["replicas"] == 0
    world.settle()
    assert world.sets() == [] and world.condition("Ready") == ("False", "Idle")


def test_an_autoscaler_that_writes_replicas_is_not_fought_and_wakes_nothing() -> None:
    world = settled({"replicas": 1})
    world.edit({"replicas": 3})
    world.settle()
    assert world.sets() == []
    world.ask()
    until_answered(world)
    assert len(world.sets()) == 3
    world.edit({"replicas": 0})
    world.ask()
    world.reconcile()
    assert len(world.sets()) == 1, "requests come, so one group stays"


def test_a_request_that_comes_while_groups_drain_wakes_it_again() -> None:
    world = World(IDLE)
    while world.condition("Ready")[1] != "Idle" if world.status.conditions else True:
        world.reconcile()
        world.tick(1.0)
    assert world.pods and all(member.deleted_at is not None for member in world.pods) and not world.sets()
    world.ask()
    world.reconcile()
    assert len(world.sets()) == 1
    until_answered(world)


def test_clients_that_gave_up_do_not_stop_a_start() -> None:
    world = settled({})
    world.ask()
    world.reconcile()
    world.open, world.quiet_since = 0, world.now
    for _ in range(10):
        world.reconcile()
        world.tick(20.0)
        if world.available():
            break
    world.reconcile()
    assert len(world.available()) == 1 and world.condition("Ready") == ("True", "Serving")


def test_an_operator_that_starts_takes_what_it_does_not_know_for_requests() -> None:
    world = settled({})
    world.ask()
    until_answered(world)
    world.blind = True
    world.reconcile()
    world.tick(1000)
    world.reconcile()
    assert len(world.sets()) == 1
    world.blind, world.mute_routers = False, 1
    world.reconcile()
    assert len(world.sets()) == 1
    world.mute_routers = 0
    world.settle()
    assert world.sets() == []


def test_suspend_and_a_refused_spec_hold_what_is() -> None:
    world = settled({})
    world.edit({"engine": {"extraArgs": {"no_such": 1}}})
    world.ask()
    world.reconcile()
    assert world.sets() == [] and world.status.scaling is not None and world.status.scaling.wanted == 0
    world.edit({"suspend": True, "engine": {"extraArgs": {"no_such": None}}})
    world.changes["engine"] = {}
    world.settle()
    assert world.sets() == [] and world.condition("Ready")[1] == "Suspended" and world.status.scaling is None
    world.edit({"suspend": False})
    until_answered(world)


def test_routers_are_told_why_nobody_serves_and_for_how_long() -> None:
    world = World(IDLE | {"model": {"source": "hf://org/name", "servedNames": ["big", "small"]}})
    first = world.reconcile().notice
    assert first.models == ["big", "small"] and first.phase == "Progressing" and "0 of 1 groups exist" in first.message
    while not world.available():
        world.reconcile()
        world.tick(10.0)
    assert world.reconcile().notice == ServiceNotice(models=["big", "small"])
    world.settle()
    assert world.decide().notice.message == world.message() and world.decide().notice.phase == "Idle"
    assert world.decide().notice.eta_seconds is None
    world.ask()
    world.reconcile()
    world.tick()
    woken = world.reconcile().notice
    assert world.status.scaling is not None and world.status.scaling.start_seconds > 10
    assert woken.eta_seconds == pytest.approx(world.status.scaling.start_seconds, abs=2)


def test_the_longest_of_what_pods_say_counts() -> None:
    world = settled({})
    world.ask()
    world.reconcile()
    world.tick()
    observed = world.observe()
    (pod,) = observed.pods
    assert pod.report is not None
    loading = pod.report.model_copy(update={"phase": "downloading", "progress": Progress(done=1, total=2, eta_seconds=500.4)})
    notice = plan(replace(observed, pods=(replace(pod, report=loading),))).notice
    assert notice.eta_seconds == 500 and notice.message.endswith("downloading 1.0/2.0 bytes, about 500 s left")


def test_it_is_no_part_of_a_revision() -> None:
    assert spec_hash(make_spec(SLEEPS)) == spec_hash(make_spec({"router": {}}))


def uids(world: World) -> list[str]:
    return [member.uid for member in world.pods]


def test_it_goes_to_sleep_and_each_request_wakes_the_same_pods(request: pytest.FixtureRequest) -> None:
    world = settled(SLEEPS | {"replicas": 2})
    pods = uids(world)
    assert len(pods) == 2 and all(member.asleep for member in world.pods)
    assert world.condition("Ready") == ("False", "Asleep") and world.condition("ModelLoaded")[0] == "True"
    assert world.condition("Reconciling")[0] == world.condition("Stalled")[0] == world.condition("Available")[0] == "False"
    assert world.message() == "no request for 60 s; 2 groups sleep; the next request wakes them"
    for number in range(1, (40 if request.config.getoption("--whole") else 3) + 1):
        world.ask()
        assert world.reconcile().notice.phase == "Progressing"
        until_answered(world)
        world.reconcile()
        assert world.answered == number and world.condition("Ready") == ("True", "Serving")
        world.tick(3 * 86400)
        world.quiet_since = world.now - 30
        assert world.reconcile().requeue_after == pytest.approx(30.5), "what it slept for is no time without a request"
        world.settle()
        assert world.condition("Ready") == ("False", "Asleep"), "not stalled, however long it sleeps"
        assert world.event_reasons("Woken", "Asleep") == ["Asleep", *["Woken", "Asleep"] * number]
    assert uids(world) == pods and world.generation == 1, "nobody wrote the spec, and no pod is new"


def test_a_pod_that_comes_while_its_service_sleeps_goes_to_sleep() -> None:
    world = settled(SLEEPS | {"replicas": 2})
    assert world.ask_to_evict(world.pods[0]), "a pod that sleeps is in nobody's way"
    world.settle()
    assert len(world.pods) == 2 and all(member.asleep for member in world.pods)
    world.edit({"replicas": 3})
    world.settle()
    assert len(world.pods) == 3 and all(member.asleep for member in world.pods) and not world.event_reasons("Woken")


def test_an_operator_that_reaches_no_agent_leaves_pods_that_sleep_until_they_are_needed() -> None:
    world = settled(SLEEPS | {"replicas": 2})
    pods = uids(world)
    for member in world.pods:
        world.silence(member)
    world.tick(100)
    world.settle()
    assert uids(world) == pods and not world.event_reasons("Restarted")
    world.ask()
    until_answered(world)
    assert not set(uids(world)) & set(pods), "who is to wake and does not answer has failed"


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_group_takes_the_place_of_one_that_sleeps_on_a_cordoned_node(replicas: int) -> None:
    world = settled(SLEEPS | {"replicas": replicas})
    pods = uids(world)
    for member in world.pods:
        world.cordon(member)
    world.settle()
    assert uids(world) == pods and world.condition("Reconciling")[0] == "False", world.message()
    world.ask()
    world.reconcile()
    world.tick()
    world.reconcile()
    assert len(world.sets()) == replicas + 1, "one that serves is replaced before it is evicted"


def test_a_rollout_wakes_it_since_the_new_revision_has_to_serve_once() -> None:
    world = settled(SLEEPS)
    world.edit({"engine": {"blockSize": 32}})
    world.settle()
    assert world.condition("Ready") == ("False", "Asleep") and len(world.pods) == 1
    assert world.status.revision.current == world.status.revision.target
    assert [event.message for event in world.events if event.reason == "Woken"] == ["A rollout goes on: 1 groups wake"]


def test_a_service_that_sleeps_follows_its_spec() -> None:
    world = settled(SLEEPS)
    world.edit({"scaling": {"sleepLevel": 2}})
    world.settle()
    assert world.status.scaling is not None and world.status.scaling.sleep_level == 2
    world.edit({"suspend": True})
    world.ask()
    world.settle()
    assert world.sets() == [] and world.condition("Ready")[1] == "Suspended", "a suspended service is never woken"
    world.open = 0
    world.edit({"suspend": False})
    world.settle()
    world.edit({"scaling": {"standby": "none", "sleepLevel": None}})
    world.settle()
    assert world.sets() == [] and world.condition("Ready") == ("False", "Idle") and not world.event_reasons("Woken")
    world.edit({"scaling": {"standby": "asleep"}})
    world.settle()
    assert world.sets() == [], "what is at zero has nothing that could sleep"
    world.ask()
    until_answered(world)
    world.settle()
    assert world.condition("Ready") == ("False", "Asleep") and len(world.sets()) == 1


def test_without_idle_seconds_a_service_that_sleeps_wakes() -> None:
    world = settled(SLEEPS)
    world.edit({"scaling": {"standby": "none", "idleSeconds": None}})
    world.settle()
    assert world.condition("Ready") == ("True", "Serving") and world.status.scaling is None


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism": {"expert": 2}},
        {"parallelism": {"data": 2, "elastic": {"min": 1, "max": 2}}},
        {"engine": {"extraArgs": {"enable_expert_parallel": True, "enable_eplb": True}}},
    ],
)
def test_groups_that_cannot_sleep_are_refused_it(changes: dict[str, Any]) -> None:
    world = World(SLEEPS | changes)
    world.reconcile()
    assert world.condition("Stalled") == ("True", "InvalidSpec")
    assert world.message().startswith("spec.scaling.standby: must be none here: cores that share experts")
    alone = World(SLEEPS | {"parallelism": {"expert": 1}})
    alone.settle()
    assert alone.condition("Ready")[1] == "Asleep"
