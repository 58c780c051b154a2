"""The experts of each rank, and the moves when ranks join and leave."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starling_engine.errors import ConfigError
from starling_engine.topology.placement import Placement, moves, regroup, spread


def check(placement: Placement, ranks: int, redundant: int = 0) -> None:
    """Every expert somewhere, none twice on a rank, sizes equal but for one."""
    assert placement.ranks == ranks
    for layer in placement.layers:
        sizes = [len(experts) for experts in layer]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == placement.num_experts + redundant
        assert {expert for experts in layer for expert in experts} == set(range(placement.num_experts))
        assert all(list(experts) == sorted(set(experts)) for experts in layer)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "layer"),
    [
        (4, 1, 0, ((0, 1, 2, 3),)),
        (4, 2, 0, ((0, 1), (2, 3))),
        (5, 2, 0, ((0, 1, 2), (3, 4))),
        (4, 4, 0, ((0,), (1,), (2,), (3,))),
        (4, 2, 2, ((0, 1, 2), (0, 1, 3))),
        (2, 2, 2, ((0, 1), (0, 1))),
    ],
)
def test_the_first_placement(experts: int, ranks: int, redundant: int, layer: tuple[tuple[int, ...], ...]) -> None:
    placement = spread(experts, ranks, 3, redundant=redundant)
    assert placement.layers == (layer,) * 3
    assert placement.slots == len(layer[0])


@pytest.mark.parametrize(
    ("experts", "before", "after", "moved"),
    [(8, 4, 2, 4), (8, 2, 4, 4), (8, 4, 3, 2), (8, 3, 2, 2), (8, 2, 3, 2), (8, 4, 1, 6), (6, 3, 3, 0), (7, 2, 3, 2)],
)
def test_only_what_must_move_moves(experts: int, before: int, after: int, moved: int) -> None:
    old = spread(experts, before, 2)
    new = regroup(old, after)
    check(new, after)
    loads = [moves(old, new, rank) for rank in range(max(before, after))]
    assert [sum(len(load[layer]) for load in loads) for layer in range(2)] == [moved, moved]


def test_ranks_leave_and_join_at_the_end() -> None:
    assert regroup(spread(4, 2, 1), 3).layers == (((0, 1), (2,), (3,)),)
    assert regroup(spread(6, 3, 1), 2).layers == (((0, 1, 4), (2, 3, 5)),)


def test_what_a_rank_loads() -> None:
    old, new = Placement(4, (((0, 1), (2, 3)),)), Placement(4, (((0, 1, 2), (2, 3, 0)),))
    assert [moves(old, new, rank) for rank in range(3)] == [((2,),), ((0,),), ((),)]
    assert moves(None, new, 0) == ((0, 1, 2),)


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=2, max_size=5))
def test_any_sequence_of_sizes(experts: int, sizes: list[tuple[int, int]]) -> None:
    def legal(ranks: int, redundant: int) -> tuple[int, int]:
        ranks = min(ranks, experts)
        return ranks, min(redundant, (ranks - 1) * experts)

    first, *others = [legal(*size) for size in sizes]
    placement = spread(experts, first[0], 1, redundant=first[1])
    check(placement, *first)
    for ranks, redundant in others:
        after = regroup(placement, ranks, redundant=redundant)
        check(after, ranks, redundant)
        if ranks == placement.ranks and redundant == sum(map(len, placement.layers[0])) - experts:
            assert after == placement
        placement = after


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9))
def test_without_copies_moves_are_as_few_as_equal_sizes_allow(experts: int, before: int, after: int) -> None:
    before, after = min(before, experts), min(after, experts)
    old = spread(experts, before, 1)
    new = regroup(old, after)
    moved = sum(len(moves(old, new, rank)[0]) for rank in range(after))
    had = [len(old.held(rank)[0]) for rank in range(after)]
    has = [len(new.held(rank)[0]) for rank in range(after)]
    assert moved == sum(max(0, b - a) for a, b in zip(had, has, strict=True))


def test_goes_over_the_wire() -> None:
    placement = spread(5, 2, 3, redundant=1)
    assert msgspec.json.decode(msgspec.json.encode(placement), type=Placement) == placement
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(placement), type=Placement) == placement


def test_errors_name_the_possible_sizes() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size: 5 ranks cannot share the 4 experts of a layer; possible: 1 to 4"):
        spread(4, 5, 1)
    with pytest.raises(ConfigError, match="data_parallel_size: 0 ranks"):
        regroup(spread(4, 2, 1), 0)
    with pytest.raises(ConfigError, match=r"data_parallel_size: 2 ranks have 3 slots .* 8 experts .* possible: 3 ranks or more"):
        regroup(spread(8, 4, 1), 2, slots=3)
    with pytest.raises(ConfigError, match="num_redundant_experts: 2 ranks have use for 0 to 4 copies of a layer's experts, got 5"):
        spread(4, 2, 1, redundant=5)
