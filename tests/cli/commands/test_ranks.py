"""Coordinates of ranks: data parallel outermost, tensor parallel innermost."""

import pytest
from starling_cli.planning.drawing import ranks_of
from starling_crds.layout import GroupLayout


def layout(tensor=1, pipeline=1, data=1, nodes=1):
    per_node = tensor * pipeline * data // nodes
    return GroupLayout(tensor=tensor, pipeline=pipeline, data=data, per_node=per_node)


@pytest.mark.parametrize(
    ("made", "coordinates"),
    [
        (layout(), [(0, 0, 0, 0)]),
        (layout(tensor=2), [(0, 0, 0, 0), (0, 0, 1, 1)]),
        (layout(pipeline=2), [(0, 0, 0, 0), (0, 1, 0, 0)]),
        (layout(data=2), [(0, 0, 0, 0), (1, 0, 0, 1)]),
        (layout(tensor=2, data=2), [(0, 0, 0, 0), (0, 0, 1, 1), (1, 0, 0, 2), (1, 0, 1, 3)]),
        (layout(pipeline=2, data=2), [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 1), (1, 1, 0, 1)]),
    ],
)
def test_coordinates(made, coordinates):
    assert [(rank.data, rank.pipeline, rank.tensor, rank.expert) for rank in ranks_of(made)] == coordinates


@pytest.mark.parametrize(("nodes", "expected"), [(1, [0] * 8), (2, [0] * 4 + [1] * 4), (8, list(range(8)))])
def test_nodes_are_filled_in_order(nodes, expected):
    assert [rank.node for rank in ranks_of(layout(tensor=2, pipeline=2, data=2, nodes=nodes))] == expected


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(4, 2, 3), (1, 4, 4), (8, 1, 2)])
def test_every_coordinate_once(tensor, pipeline, data):
    ranks = ranks_of(layout(tensor, pipeline, data))
    assert len({(rank.data, rank.pipeline, rank.tensor) for rank in ranks}) == len(ranks) == tensor * pipeline * data
    assert {rank.expert for rank in ranks} == set(range(data * tensor))
