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


@pytest.mark.parametrize(("tensor", "pipeline", "per_node"), list(itertools.product(SIZES, (1, 2, 3), SIZES)))
def test_cores_fit_nodes_where_no_node_holds_parts_of_two(tensor, pipeline, per_node):
    layout = GroupLayout(tensor=tensor, pipeline=pipeline, data=per_node, per_node=per_node)
    cores = [rank // layout.core_ranks for rank in range(layout.ranks)]
    nodes = [cores[first : first + per_node] for first in range(0, layout.ranks, per_node)]
    assert layout.core_fits_nodes == all(_is_part_of_one_core(node) or _has_whole_cores(node, layout.core_ranks) for node in nodes)


def _is_part_of_one_core(node):
    return len(set(node)) == 1


def _has_whole_cores(node, core_ranks):
    return all(node.count(core) == core_ranks for core in node)
