"""Random lives of a service: after any edits and faults, decisions lead back to what the spec asks for."""

import math
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.operator.plan.world import BAD, Member, World

SINGLE: dict[str, Any] = {}
PAIRS = {"parallelism": {"tensor": 4}, "accelerators": {"perNode": 2}}
MODELS = ("hf://org/a", "hf://org/b", "hf://org/c", BAD)
FAULTS: dict[str, Callable[[World, Member], object]] = {
    "crash": World.crash_container,
    "break": World.break_agent,
    "stumble": World.stumble,
    "silence": World.silence,
    "lose": World.lose_node,
    "evict": World.evict,
    "cordon": World.cordon,
    "ask to evict": World.ask_to_evict,
    "fail": World.fail_pod,
}

edits = st.one_of(
    st.integers(0, 4).map(lambda count: {"replicas": count}),
    st.sampled_from(MODELS).map(lambda source: {"model": {"source": source}}),
    st.sampled_from([(0, 1), (1, 0), (1, 1), (2, 2), (0, 3)]).map(
        lambda pair: {"rollout": {"maxUnavailable": pair[0], "maxSurge": pair[1]}}
    ),
    st.booleans().map(lambda off: {"suspend": off}),
    # without routers no canary is possible
    st.sampled_from([None, {}, {"replicas": 1}]).map(
        lambda router: {"router": router} | ({"rollout": {"canary": None}} if router is None else {})
    ),
    st.sampled_from([None, [30], [20, 60]]).map(
        lambda weights: {"router": {}, "rollout": {"canary": weights and {"steps": [{"weight": w, "seconds": 9} for w in weights]}}}
    ),
    st.sampled_from([(None, "none"), (30, "none"), (30, "asleep")]).map(
        lambda pair: {"scaling": {"idleSeconds": pair[0], "standby": pair[1]}}
    ),
    st.integers(1, 9).map(lambda port: {"endpoint": {"port": 8000 + port}}),
)
FARES: tuple[dict[str, Any], ...] = ({}, {"tried": {"requests": 9, "errors": 9}}, {"compared": 9, "differing": 1})
steps = st.one_of(
    st.tuples(st.just("fare"), st.sampled_from(FARES)),
    st.tuples(st.just("edit"), edits),
    st.tuples(st.just("fault"), st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, 20))),
    st.tuples(st.just("run"), st.integers(1, 8)),
    st.tuples(st.just("wait"), st.integers(10, 100)),
    st.tuples(st.just("kill"), st.integers(0, 15)),
    st.tuples(st.just("ask"), st.integers(1, 9)),
)
lives = st.lists(steps, max_size=25)
shapes = st.sampled_from([SINGLE, PAIRS])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(life=lives, shape=shapes, node_slots=st.sampled_from([6, 40]))
def test_every_life_ends_as_the_spec_asks(life: list[tuple[str, Any]], shape: dict[str, Any], node_slots: int) -> None:
    world = World({"replicas": 2, "recovery": {"restartBudget": 1000}} | shape, node_slots=node_slots)
    for kind, what in life:
        _live(world, kind, what)
    world.node_slots, world.cordoned, world.fares = 40, frozenset(), {}
    scaling = {"idleSeconds": None, "standby": "none"}
    world.edit({"model": {"source": "hf://org/final"}, "suspend": False, "replicas": 3, "scaling": scaling})
    world.settle()
    assert world.condition("Ready") == ("True", "Serving"), world.message()
    assert len(world.sets()) == len(world.available()) == 3
    _nothing_more_to_do(world)


def _nothing_more_to_do(world: World) -> None:
    first = world.decide()
    second = world.reconcile()
    third = world.reconcile()
    assert first == second == third
    assert not third.create and not third.delete and not third.events
    live = {key: child["spec"] for key, child in world.children.items() if "spec" in child}
    assert {(made["kind"], made["metadata"]["name"]) for made in third.apply if "spec" in made} == set(live)


def _live(world: World, kind: str, what: Any) -> None:
    if kind == "edit":
        world.edit(what)
    elif kind == "fault":
        name, which = what
        if world.pods:
            FAULTS[name](world, world.pods[which % len(world.pods)])
    elif kind == "fare":
        world.fares = what
    elif kind == "ask":
        world.ask(what)
    elif kind == "wait":
        world.tick(what)
    elif kind == "kill":
        _killed(world, what)
        return
    for _ in range(what if kind == "run" else 1):
        _watched_reconcile(world)
        world.tick()


def _killed(world: World, writes: int) -> None:
    """The operator dies in the middle; the next one has not heard of any agent yet."""
    world.reconcile(writes)
    world.blind = True
    _watched_reconcile(world)
    world.blind = False
    world.tick()


def _watched_reconcile(world: World) -> None:
    """A decision never makes too many groups, and takes none that are needed."""
    before, available = len(world.sets()), set(world.available())
    decision = world.reconcile()
    to_agents = "serving.starling.dev/role" in world.children["Service", "chat"]["spec"]["selector"]
    assert to_agents or ("Deployment", "chat-router") in world.children
    spec = world.spec
    wanted = 0 if spec.suspend else spec.replicas
    if decision.status.scaling is not None:
        assert not spec.suspend
        wanted = decision.status.scaling.wanted
        serves = wanted and not decision.status.scaling.sleep_level
        assert serves or not world.open or world.blind, "no request waits at zero, or for one that sleeps"
    removed = {deletion.name for deletion in decision.delete if deletion.kind == "StatefulSet"}
    made = len(world.sets()) + len(removed) - before
    canary = spec.rollout.canary
    on_top = max(1, math.ceil(wanted * canary.steps[-1].weight / 100)) if canary is not None else 0
    assert made == 0 or before + made <= wanted + spec.rollout.max_surge + on_top
    floor = wanted - (spec.rollout.max_unavailable if spec.rollout.max_surge or spec.rollout.max_unavailable else 1)
    assert len(available - removed) >= min(len(available), floor), (available, removed, floor)
