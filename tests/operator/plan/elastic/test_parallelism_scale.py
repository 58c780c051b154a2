"""The wanted size: who wrote it last, and what becomes of a size that no group can have."""

from typing import Any

import pytest
from starling_crds.spec_layout import elastic_sizes, group_layout
from starling_operator.plan.elastic.parallelism_scale import TAKEN, desired_size
from starling_operator.plan.observed import Manifest
from starling_operator.plan.plan import plan

from tests.operator.plan.building import make_observed, make_spec
from tests.operator.plan.elastic.world import ElasticWorld, elastic


def live(replicas: int, taken: str | None = "expert=2", **metadata: Any) -> Manifest:
    annotations = {} if taken is None else {TAKEN: taken}
    head = {"name": "chat", "namespace": "prod", "uid": "u", "annotations": annotations}
    return {
        "apiVersion": "serving.starling.dev/v1alpha1",
        "kind": "ParallelismScale",
        "metadata": head | metadata,
        "spec": {"replicas": replicas},
    }


@pytest.mark.parametrize(
    ("child", "requested"),
    [
        (None, 2),
        (live(2), 2),
        (live(5), 5),
        # the InferenceService was edited since
        (live(5, "expert=3"), 2),
        (live(5, "data=2"), 2),
        (live(5, None), 2),
        (live(5, deletionTimestamp="2026-01-01T00:00:00Z"), 2),
    ],
)
def test_the_last_writer_wins(child: Manifest | None, requested: int) -> None:
    children = {} if child is None else {("ParallelismScale", "chat"): child}
    spec = make_spec(elastic(2))
    found = desired_size(make_observed(spec, children=children), spec)
    assert found is not None
    assert (found.requested, found.data, found.taken, found.rounded) == (requested, requested, "expert=2", "")


@pytest.mark.parametrize(
    ("parallelism", "per_node", "requested", "units", "possible"),
    [
        ({"expert": 2, "tensor": 2, "elastic": {"min": 2, "max": 8}}, 1, 3, 4, "2, 4, 6, 8"),
        ({"expert": 2, "tensor": 2, "elastic": {"min": 2, "max": 8}}, 1, 1, 2, "2, 4, 6, 8"),
        ({"expert": 4, "elastic": {"min": 4, "max": 12}}, 4, 5, 8, "4, 8, 12"),
        ({"expert": 4, "elastic": {"min": 4, "max": 12}}, 4, 4096, 12, "4, 8, 12"),
        ({"data": 2, "tensor": 2, "elastic": {"min": 2, "max": 6}}, 4, 3, 4, "2, 4, 6"),
        ({"data": 1, "pipeline": 2, "elastic": {"min": 1, "max": 3}}, 1, 9, 3, "1, 2, 3"),
        ({"data": 1, "elastic": {"min": 1, "max": 64}}, 1, 65, 64, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, ..."),
    ],
)
def test_a_size_that_no_group_can_have(
    parallelism: dict[str, Any], per_node: int, requested: int, units: int, possible: str
) -> None:
    """The next larger size is taken, so that nobody gets less than requested; else the largest."""
    spec = make_spec({"parallelism": parallelism, "accelerators": {"perNode": per_node}})
    unit = "expert" if "expert" in parallelism else "data"
    child = live(requested, f"{unit}={parallelism[unit]}")
    found = desired_size(make_observed(spec, children={("ParallelismScale", "chat"): child}), spec)
    assert found is not None
    assert found.units == units
    assert found.rounded == f"spec.replicas: no group can have {requested}, so it is {units}; possible for {unit} are {possible}"


def test_a_service_without_bounds_has_none() -> None:
    spec = make_spec({"parallelism": {"expert": 4}})
    assert desired_size(make_observed(spec), spec) is None
    assert not [made for made in plan(make_observed(make_spec())).apply if made["kind"] == "ParallelismScale"]


def test_sizes_fill_whole_nodes() -> None:
    spec = make_spec({"parallelism": {"data": 2, "tensor": 2, "elastic": {"min": 2, "max": 8}}, "accelerators": {"perNode": 4}})
    assert elastic_sizes(spec.parallelism, 4) == (2, 4, 6, 8)
    layout = group_layout(spec.parallelism, 4)
    larger = layout.with_data(6)
    assert (larger.nodes, larger.ranks, larger.data, larger.expert, str(larger)) == (3, 12, 6, 12, "TP2 PP1 DP6")
    assert larger.with_data(2) == layout


def test_an_autoscaler_and_the_spec_take_turns() -> None:
    world = ElasticWorld(elastic(2))
    world.settle()
    world.scale(5)
    world.settle()
    assert world.sizes() == [5]
    world.edit({"replicas": 2})
    world.settle()
    assert world.sizes() == [5, 5]
    world.edit({"parallelism": {"expert": 3}})
    world.settle()
    assert (world.sizes(), world.children["ParallelismScale", "chat"]["spec"]) == ([3, 3], {"replicas": 3})
    world.scale(9)
    world.settle()
    assert world.sizes() == [8, 8]
    status = world.scale_status()
    assert (status["replicas"], status["target"]) == (8, 8)
    assert {each["type"]: each["status"] for each in status["conditions"]} == {"Ready": "True", "Rounded": "True"}


def test_its_object_comes_back_with_the_size_of_the_spec() -> None:
    world = ElasticWorld(elastic(2))
    world.settle()
    world.scale(4)
    world.settle()
    del world.children["ParallelismScale", "chat"]
    world.settle()
    assert world.sizes() == [2]


def test_several_ranks_a_pod() -> None:
    split = {"tensor": 2, "expert": 4, "elastic": {"min": 4, "max": 12}}
    world = ElasticWorld({"parallelism": split, "accelerators": {"perNode": 4}})
    world.settle()
    assert (world.sizes(), len(world.pods)) == ([2], 1)
    world.scale(9)
    world.settle()
    assert (world.sizes(), len(world.pods)) == ([6], 3)
    assert world.status.topology == "TP2 PP1 DP6 EP12"
    effective = world.status.groups[0].effective
    assert effective is not None
    assert (effective.data, effective.expert) == (6, 12)
    assert world.scale_status()["replicas"] == 12
