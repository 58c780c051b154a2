"""Which ranks run on which node of a group."""

import pytest
from starling_agent.contract.config import LayoutConfig
from starling_agent.group.node_layout import NodeLayout


@pytest.mark.parametrize(
    ("layout", "cores"),
    [
        ({}, [(0,)]),
        ({"data": 3}, [(0,), (1,), (2,)]),
        ({"data": 4, "per_node": 2}, [(0, 1), (2, 3)]),
        ({"data": 2, "tensor": 2, "per_node": 2}, [(0,), (1,)]),
        ({"tensor": 4, "per_node": 2}, [(0,), ()]),
        ({"tensor": 2, "pipeline": 3, "per_node": 3}, [(0,), ()]),
        ({"data": 2, "pipeline": 2}, [(0,), (), (1,), ()]),
    ],
)
def test_cores_run_on_the_node_of_their_first_worker(layout: dict[str, int], cores: list[tuple[int, ...]]) -> None:
    group = LayoutConfig.model_validate(layout).largest
    node_layout = NodeLayout(group)
    assert [node_layout.cores(node) for node in range(group.nodes)] == cores


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        ({"data": 3}, [(), (), ()]),
        ({"tensor": 2}, [(), ((0, 1),)]),
        ({"tensor": 4, "per_node": 2}, [(), ((0, 2), (0, 3))]),
        ({"tensor": 2, "pipeline": 3, "per_node": 3}, [(), ((0, 3), (0, 4), (0, 5))]),
        ({"data": 2, "pipeline": 2}, [(), ((0, 1),), (), ((1, 1),)]),
    ],
)
def test_other_workers_of_a_core_run_on_the_nodes_after_it(
    layout: dict[str, int], workers: list[tuple[tuple[int, int], ...]]
) -> None:
    group = LayoutConfig.model_validate(layout).largest
    node_layout = NodeLayout(group)
    assert [node_layout.workers_for_others(node) for node in range(group.nodes)] == workers
