"""Placement of experts by their load: its promises, on any load."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starling_engine.errors import ConfigError
from starling_engine.expert_parallel.eplb import _copies, rebalance
from starling_engine.expert_parallel.load import imbalance
from starling_engine.topology.placement import Placement, moves, spread


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Groups over nodes where they divide, and where they do not; loads from even to all on one expert."""
    groups, size, nodes = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    experts = groups * size
    ranks = draw(st.integers(1, min(experts, 9)))
    slots = draw(st.integers(-(-experts // ranks), experts))
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load = rng.pareto(draw(st.sampled_from([0.3, 1.0, 5.0])), (layers, experts)) * draw(st.sampled_from([0, 1, 1, 1000]))
    return {"load": load, "ranks": ranks, "slots": slots, "nodes": nodes, "groups": groups}


def check(placement: Placement, case: dict[str, Any]) -> None:
    assert placement.ranks == case["ranks"] and len(placement.layers) == len(case["load"])
    for layer in placement.layers:
        assert {expert for experts in layer for expert in experts} == set(range(case["load"].shape[1]))
        for experts in layer:
            assert len(experts) <= case["slots"] and list(experts) == sorted(set(experts))


@given(cases())
@settings(max_examples=300)
def test_every_expert_is_somewhere_and_no_rank_has_too_many(case: dict[str, Any]) -> None:
    check(rebalance(**case), case)


@given(cases())
@settings(max_examples=300)
def test_the_busiest_rank_has_at_most_one_copy_more_than_the_mean(case: dict[str, Any]) -> None:
    """Packed greedily, heaviest first, no rank can end further above the others than the heaviest copy, over all ranks alike."""
    case = {**case, "nodes": 1, "slots": min(case["slots"], -(-case["load"].shape[1] // case["ranks"]))}
    load, ranks = case["load"], case["ranks"]
    placement = rebalance(**case)
    for row, layer, ratio in zip(load, placement.layers, imbalance(load, placement), strict=True):
        copies = np.array([sum(expert in experts for experts in layer) for expert in range(len(row))])
        mean = row.sum() / ranks
        assert ratio * mean <= mean + (row / copies).max() + 1e-9


@given(cases())
@settings(max_examples=300)
def test_never_worse_than_before_and_little_moves_for_little(case: dict[str, Any]) -> None:
    load = case["load"]
    before = spread(load.shape[1], case["ranks"], len(load), redundant=min(1, case["ranks"] * case["slots"] - load.shape[1]))
    after = rebalance(**case, previous=before)
    check(after, case)
    was, now = imbalance(load, before), imbalance(load, after)
    assert (now <= was + 1e-9).all()
    for layer, (one, other) in enumerate(zip(before.layers, after.layers, strict=True)):
        assert one == other or now[layer] < was[layer] - 0.02
    again = rebalance(**case, previous=after)
    assert again == after or (imbalance(load, again) <= now + 1e-9).all()


def test_the_most_loaded_get_copies() -> None:
    assert _copies(np.array([[8.0, 1.0, 3.0], [1.0, 1.0, 5.0]]), 2, 4).tolist() == [[3, 1, 1], [1, 1, 3]]
    assert _copies(np.array([[8.0, 1.0, 3.0]]), 3, 2).tolist() == [[2, 2, 2]]  # a rank has use for one


def test_a_hot_expert_is_shared_out() -> None:
    load = np.array([[90.0, 10.0, 10.0, 10.0]])
    before = spread(4, 2, 1, redundant=2)
    assert imbalance(load, before)[0] == pytest.approx(1.0)
    assert imbalance(load, spread(4, 2, 1))[0] == pytest.approx(100 / 60)
    after = rebalance(load, 2, 3)
    assert all(0 in experts for experts in after.layers[0])
    assert imbalance(load, after)[0] == pytest.approx(1.0)


def test_groups_stay_on_one_node() -> None:
    load = np.random.default_rng(0).pareto(1.0, (5, 32))
    placement = rebalance(load, 8, 5, nodes=2, groups=8)
    for layer in placement.layers:
        nodes = [{expert // 4 for experts in layer[at : at + 4] for expert in experts} for at in (0, 4)]
        assert not nodes[0] & nodes[1] and len(nodes[0]) == len(nodes[1]) == 4


def test_what_does_not_gain_stays_and_the_rest_moves_little() -> None:
    rng = np.random.default_rng(1)
    load = rng.pareto(2.0, (20, 64)) + 0.1
    before = rebalance(load, 8, 9)
    assert rebalance(load * rng.uniform(0.99, 1.01, load.shape), 8, 9, previous=before) == before
    drifted = load * rng.uniform(0.5, 2.0, load.shape)
    after, fresh = rebalance(drifted, 8, 9, previous=before), rebalance(drifted, 8, 9)

    def moved(placement: Placement) -> int:
        return sum(len(layer) for rank in range(8) for layer in moves(before, placement, rank))

    assert moved(after) < 0.9 * moved(fresh)
    assert imbalance(drifted, after).max() < imbalance(drifted, before).max()


def test_a_layer_without_load_is_placed_too() -> None:
    placement = rebalance(np.zeros((2, 6)), 3, 2)
    check(placement, {"load": np.zeros((2, 6)), "ranks": 3, "slots": 2})
    assert imbalance(np.zeros((2, 6)), placement).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("slots", [1, 9])
def test_too_few_slots_and_too_many_are_refused(slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"3 ranks with {slots} slots each cannot share 8 experts; possible: 3 to 8 slots"):
        rebalance(np.ones((1, 8)), 3, slots)
