"""The size rule of groups, compared with counting."""

import itertools

import pytest
from starling_crds.layout import GroupLayout

SIZES = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize(("tensor", "pipeline", "per_node"), list(itertools.product(SIZES, (1, 2, 3), SIZES)))
def test_possible_sizes_are_those_that_fill_whole_nodes(tensor, pipeline, per_node):
    layout = GroupLayout(tensor=tensor, pipeline=pipeline, data=1, per_node=per_node)
    possible = tuple(data for data in range(1, 30) if data * tensor * pipeline % per_node == 0)
    assert layout.sizes(1, 29) == possible
    assert tuple(data for data in range(1, 30) if layout.with_data(data).fills_nodes) == possible
    assert layout.sizes(possible[0], possible[0]) == possible[:1]


@pytest.mark.parametrize(("data", "nodes"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_pods_of_a_group(data, nodes):
    layout = GroupLayout(tensor=2, pipeline=1, data=data, per_node=4)
    assert (layout.nodes, layout.ranks, layout.expert) == (nodes, 2 * data, 2 * data)


def test_a_core_may_span_nodes_where_its_tensor_ranks_do_not():
    layout = GroupLayout(tensor=2, pipeline=3, data=2, per_node=4)
    assert layout.fills_nodes and layout.tensor_fits_nodes and not layout.core_fits_nodes
