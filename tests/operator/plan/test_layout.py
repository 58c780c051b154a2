"""Number of nodes and ranks of a group, and layouts that are impossible."""

import re
from typing import Any

import pytest
from starling_crds.spec_layout import group_layout
from starling_crds.v1alpha1.parallelism import ElasticBounds, Parallelism


def sizes(**fields: Any) -> Parallelism:
    """Makes sizes without the types' own rules: the arithmetic must hold for objects that an older API server let through."""
    given = {"tensor": 1, "pipeline": 1, "data": None, "expert": None, "elastic": None} | fields
    if isinstance(given["elastic"], tuple):
        given["elastic"] = ElasticBounds.model_construct(min=given["elastic"][0], max=given["elastic"][1])
    return Parallelism.model_construct(**given)


@pytest.mark.parametrize(
    ("fields", "per_node", "nodes", "ranks", "data", "expert"),
    [
        ({}, 1, 1, 1, 1, 1),
        ({"tensor": 2}, 1, 2, 2, 1, 2),
        ({"tensor": 2}, 2, 1, 2, 1, 2),
        ({"tensor": 8}, 8, 1, 8, 1, 8),
        ({"tensor": 8}, 4, 2, 8, 1, 8),
        ({"tensor": 8}, 1, 8, 8, 1, 8),
        ({"tensor": 16}, 8, 2, 16, 1, 16),
        ({"pipeline": 2}, 1, 2, 2, 1, 1),
        ({"pipeline": 4}, 2, 2, 4, 1, 1),
        ({"pipeline": 2, "tensor": 4}, 4, 2, 8, 1, 4),
        ({"pipeline": 2, "tensor": 4}, 8, 1, 8, 1, 4),
        ({"pipeline": 3, "tensor": 2}, 2, 3, 6, 1, 2),
        ({"pipeline": 3, "tensor": 2}, 3, 2, 6, 1, 2),
        ({"pipeline": 3, "tensor": 2}, 6, 1, 6, 1, 2),
        ({"data": 1}, 1, 1, 1, 1, 1),
        ({"data": 4}, 1, 4, 4, 4, 4),
        ({"data": 4}, 2, 2, 4, 4, 4),
        ({"data": 4}, 4, 1, 4, 4, 4),
        ({"data": 2, "tensor": 4}, 8, 1, 8, 2, 8),
        ({"data": 4, "tensor": 2}, 4, 2, 8, 4, 8),
        ({"data": 3, "tensor": 2}, 2, 3, 6, 3, 6),
        ({"data": 2, "pipeline": 2, "tensor": 2}, 4, 2, 8, 2, 4),
        ({"data": 2, "pipeline": 2, "tensor": 2}, 1, 8, 8, 2, 4),
        ({"expert": 1}, 1, 1, 1, 1, 1),
        ({"expert": 8}, 8, 1, 8, 8, 8),
        ({"expert": 8}, 1, 8, 8, 8, 8),
        ({"expert": 8, "tensor": 2}, 2, 4, 8, 4, 8),
        ({"expert": 8, "tensor": 8}, 8, 1, 8, 1, 8),
        ({"expert": 64}, 8, 8, 64, 64, 64),
        ({"expert": 64, "tensor": 4}, 8, 8, 64, 16, 64),
        ({"expert": 4, "pipeline": 2}, 4, 2, 8, 4, 4),
        ({"expert": 4, "elastic": (1, 4)}, 1, 4, 4, 4, 4),
        ({"expert": 4, "tensor": 2, "elastic": (2, 8)}, 2, 2, 4, 2, 4),
        ({"data": 2, "elastic": (1, 8)}, 1, 2, 2, 2, 2),
        ({"data": 2, "elastic": (2, 2)}, 1, 2, 2, 2, 2),
        ({"elastic": (1, 2)}, 1, 1, 1, 1, 1),
    ],
)
def test_sizes_multiply_up(fields: dict[str, Any], per_node: int, nodes: int, ranks: int, data: int, expert: int) -> None:
    layout = group_layout(sizes(**fields), per_node)
    assert (layout.nodes, layout.ranks, layout.data, layout.expert) == (nodes, ranks, data, expert)
    assert layout.nodes * per_node == layout.ranks == layout.data * layout.pipeline * layout.tensor


@pytest.mark.parametrize(
    ("fields", "per_node", "field", "says"),
    [
        ({"data": 2, "expert": 2}, 1, "parallelism", "at most one of data and expert"),
        ({"data": 1, "expert": 1}, 1, "parallelism", "at most one of data and expert"),
        ({"expert": 3, "tensor": 2}, 1, "parallelism.expert", "multiple of parallelism.tensor (2), got 3"),
        ({"expert": 1, "tensor": 2}, 1, "parallelism.expert", "multiple"),
        ({"tensor": 3}, 2, "accelerators.perNode", "must divide the 3 ranks"),
        ({"tensor": 4}, 3, "accelerators.perNode", "must divide the 4 ranks"),
        ({"tensor": 6}, 4, "accelerators.perNode", "must divide the 6 ranks"),
        ({"data": 2, "pipeline": 3, "tensor": 2}, 4, "accelerators.perNode", "must divide the 6 ranks"),
        ({}, 2, "accelerators.perNode", "a group has 1 rank "),
        ({"tensor": 2}, 4, "accelerators.perNode", "a divisor of 2"),
        ({"data": 3}, 2, "accelerators.perNode", "a group has 3 ranks"),
        ({"data": 3, "tensor": 2}, 4, "accelerators.perNode", "a group has 6 ranks"),
        ({"pipeline": 3}, 2, "accelerators.perNode", "must divide the 3 ranks of a data parallel rank"),
        ({"expert": 6, "tensor": 2}, 4, "accelerators.perNode", "whole nodes"),
        ({"data": 2, "elastic": (3, 2)}, 1, "parallelism.elastic", "min (3) must not be above max (2)"),
        ({"data": 1, "elastic": (2, 4)}, 1, "parallelism.data", "within elastic 2..4, got 1"),
        ({"elastic": (2, 4)}, 1, "parallelism.data", "within elastic 2..4, got 1"),
        ({"expert": 8, "elastic": (1, 4)}, 1, "parallelism.expert", "within elastic 1..4, got 8"),
        ({"expert": 4, "tensor": 2, "elastic": (1, 4)}, 2, "parallelism.elastic.min", "multiple"),
        ({"expert": 4, "tensor": 2, "elastic": (2, 5)}, 2, "parallelism.elastic.max", "multiple"),
        ({"data": 4, "elastic": (1, 4)}, 4, "parallelism.elastic.min", "whole nodes"),
        ({"data": 4, "elastic": (4, 6)}, 4, "parallelism.elastic.max", "whole nodes"),
    ],
)
def test_an_impossible_layout_names_its_field(fields: dict[str, Any], per_node: int, field: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(field)}: .*{re.escape(says)}"):
        group_layout(sizes(**fields), per_node)


def test_a_layout_reads_as_people_write_it() -> None:
    assert str(group_layout(sizes(tensor=2, data=4), 2)) == "TP2 PP1 DP4"
