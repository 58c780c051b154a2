"""The memory plan."""

from typing import Any

import pytest
from starling_engine.errors import ConfigError
from starling_engine.kv.spec import KVGroup, KVSpec, WindowSpec, group_layers, peak_blocks
from starling_engine.ledger import plan_memory

PLAN: dict[str, Any] = {
    "total": 1000,
    "available": 900,
    "fraction": 0.5,
    "weights": 100,
    "activations": 50,
    "kv_bytes": None,
    "bytes_per_block": 10,
    "block_size": 16,
    "useful_blocks": 1000,
    "needed_blocks": 3,
}


@pytest.mark.parametrize(
    ("changes", "blocks", "left"),
    [
        ({}, 35, 0),
        ({"useful_blocks": 7}, 7, 280),
        ({"kv_bytes": 105}, 10, 750),
        ({"available": 200}, 15, 0),
    ],
)
def test_what_fits(changes: dict[str, Any], blocks: int, left: int) -> None:
    ledger = plan_memory(**{**PLAN, **changes})
    assert (ledger.num_blocks, ledger.left) == (blocks, left)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fraction": 0.16}, "at least 0.18"),
        ({"kv_bytes": 25}, "at least 30"),
        ({"kv_bytes": 2000}, "at most 850"),
        ({"weights": 990, "fraction": 1.0}, "lower max_model_len"),
    ],
)
def test_what_does_not_fit_names_a_value_that_does(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_memory(**{**PLAN, **changes})


FULL, WINDOW = KVSpec(8, 1, 8, 4), WindowSpec(8, 1, 8, 4, 16)


def test_layers_of_one_kind_share_a_table_and_all_groups_a_page_size() -> None:
    groups = group_layers([FULL, WINDOW, WINDOW, FULL, WINDOW])
    assert groups == [KVGroup(FULL, (0, 3)), KVGroup(WINDOW, (1, 2)), KVGroup(WINDOW, (4,))]
    with pytest.raises(ValueError, match="different sizes"):
        group_layers([FULL, KVSpec(8, 2, 8, 4)])


def test_a_window_bounds_what_a_sequence_holds() -> None:
    assert peak_blocks([KVGroup(FULL, (0,))], 100, 32) == 13
    assert peak_blocks([KVGroup(WINDOW, (0,))], 1000, 32) == 7
    assert peak_blocks([KVGroup(FULL, (0,)), KVGroup(WINDOW, (1,))], 16, 32) == 4
