"""Elastic services in lives of edits, faults and kills: each ends at the size that was requested last."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.operator.plan.elastic.world import ElasticWorld, elastic
from tests.operator.plan.test_simulation import FAULTS

edits = st.one_of(
    st.integers(1, 6).map(lambda size: {"parallelism": {"expert": size}}),
    st.integers(0, 3).map(lambda count: {"replicas": count}),
    st.sampled_from([16, 32]).map(lambda size: {"engine": {"blockSize": size}}),
    st.booleans().map(lambda off: {"suspend": off}),
)
steps = st.one_of(
    st.tuples(st.just("edit"), edits),
    st.tuples(st.just("scale"), st.integers(1, 9)),
    st.tuples(st.just("fault"), st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, 20))),
    st.tuples(st.just("fail"), st.integers(0, 2)),
    st.tuples(st.just("deaf"), st.booleans()),
    st.tuples(st.just("forget"), st.none()),
    st.tuples(st.just("kill"), st.integers(0, 20)),
    st.tuples(st.just("run"), st.integers(1, 8)),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(life=st.lists(steps, max_size=25), node_slots=st.sampled_from([5, 60]))
def test_every_life_ends_at_the_size_that_is_asked_for(life: list[tuple[str, Any]], node_slots: int) -> None:
    world = ElasticWorld(elastic(2, replicas=1, recovery={"restartBudget": 1000}), node_slots=node_slots)
    for kind, what in life:
        _live(world, kind, what)
    world.node_slots, world.deaf, world.failures = 100, False, 0
    last = world.spec.parallelism.expert
    # Another model too: a group that never served and gave up is only replaced by another revision.
    final = {"model": {"source": "hf://org/final"}, "suspend": False, "replicas": 2}
    world.edit(final | {"parallelism": {"expert": 5 if last != 5 else 4}})
    world.settle()
    assert world.condition("Ready") == ("True", "Serving"), world.message()
    assert world.sizes() == [world.spec.parallelism.expert] * 2
    assert len(world.pods) == sum(world.sizes())
    assert world.scale_status()["replicas"] == world.spec.parallelism.expert
    _nothing_more_to_do(world)


def _live(world: ElasticWorld, kind: str, what: Any) -> None:
    if kind == "edit":
        world.edit(what)
    elif kind == "scale" and ("ParallelismScale", "chat") in world.children:
        world.scale(what)
    elif kind == "fault" and world.pods:
        name, which = what
        FAULTS[name](world, world.pods[which % len(world.pods)])
    elif kind == "fail":
        world.failures = what
    elif kind == "deaf":
        world.deaf = what
    elif kind == "forget":
        world.status = type(world.status)()
        world.answers.clear()
    elif kind == "kill":
        world.reconcile(what)
        world.answers.clear()
        world.blind = True
        _watched(world)
        world.blind = False
    for _ in range(what if kind == "run" else 1):
        _watched(world)
        world.tick()


def _watched(world: ElasticWorld) -> None:
    """No pod of a serving epoch is taken from its StatefulSet, and no call is of an operation that the status does not hold."""
    stored = {group.operation.id for group in world.status.groups if group.operation is not None}
    decision = world.reconcile()
    assert {call.operation for call in decision.scale_calls} <= stored
    for live in world.sets():
        leader = world.leaders.get(live["metadata"]["name"])
        if leader is not None and leader.effective:
            assert live["spec"]["replicas"] >= world._nodes(live["metadata"]["name"], leader.effective)


def _nothing_more_to_do(world: ElasticWorld) -> None:
    first = world.decide()
    second = world.reconcile()
    third = world.reconcile()
    assert first == second == third
    assert not third.create and not third.delete and not third.events and not third.scale_calls
