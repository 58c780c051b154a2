"""EPLB's arguments: the resolved settings, and impossible ones."""

from pathlib import Path
from typing import Any

import pytest
from starling_engine import EngineArgs
from starling_engine.config import EplbConfig
from starling_engine.elastic.epoch_plans import ExpertSpace, count_nodes
from starling_engine.errors import ConfigError
from starling_engine.frontend.resolve import resolve
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.checkpoints import BASE, EXPERTS

EP: dict[str, Any] = {"enable_expert_parallel": True, "enable_eplb": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight experts in each of three layers; a configuration without weights."""
    path = tmp_path_factory.mktemp("experts")
    config = CONFIG_MAPPING["qwen3_moe"](**{**BASE, **EXPERTS}, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("args", "slots", "spare", "copies"),
    [
        ({"data_parallel_size": 2}, 4, 4, {2: 0}),
        ({"data_parallel_size": 2, "num_redundant_experts": 3}, 6, 2, {2: 4}),  # rounded up
        ({"data_parallel_size": 4, "num_redundant_experts": 4}, 3, 3, {4: 4}),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, 2, 2, {4: 0}),
        ({"tensor_parallel_size": 4}, 2, 2, {4: 0}),
        ({"data_parallel_size": 4, "num_redundant_experts": 4, "enable_elastic_ep": True}, 8, 0, {1: 0, 2: 4, 3: 4, 4: 4}),
        ({"data_parallel_size": 4, "enable_elastic_ep": True, "min_data_parallel_size": 2}, 4, 4, {2: 0, 3: 1, 4: 0}),
    ],
    ids=str,
)
def test_slots_suffice_for_all_sizes(folder: str, args: dict[str, Any], slots: int, spare: int, copies: dict[int, int]) -> None:
    _, model, config = resolve(EngineArgs(model=folder, **EP, **args, eplb_window_size=10, eplb_step_interval=30))
    redundant = args.get("num_redundant_experts", 0)
    assert config.worker.dp_sync and config.worker.expert_slots == slots
    assert config.worker.eplb == EplbConfig(window=10, interval=30, redundant=redundant, spare=spare)
    space = ExpertSpace.of(model, config)
    assert {ranks: space.copies(ranks) for ranks in copies} == copies


@pytest.mark.parametrize(
    ("args", "field", "message"),
    [
        ({"enable_eplb": True, "data_parallel_size": 2}, "enable_eplb", "it needs enable_expert_parallel"),
        ({**EP}, "enable_eplb", "it needs several ranks"),
        ({**EP, "data_parallel_size": 2, "num_redundant_experts": 9}, "num_redundant_experts", "0 to 8 copies .* 8 experts, got 9"),
        ({**EP, "data_parallel_size": 2, "num_redundant_experts": -1}, "num_redundant_experts", "at least 0"),
        ({"num_redundant_experts": 1}, "num_redundant_experts", "enable_eplb"),
        ({**EP, "eplb_window_size": 0}, "eplb_window_size", "at least 1"),
        ({**EP, "eplb_step_interval": 0}, "eplb_step_interval", "at least 1"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(folder: str, args: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve(EngineArgs(model=folder, **args))
    assert refused.value.field == field


def test_a_model_without_experts_has_none_to_balance() -> None:
    dense = str(Path(__file__).parents[3] / "models" / "starling-pydoc")
    with pytest.raises(ConfigError, match="no experts") as refused:
        resolve(EngineArgs(model=dense, data_parallel_size=2, **EP))
    assert refused.value.field == "enable_expert_parallel"


@pytest.mark.parametrize(("hosts", "nodes"), [("aabb", 2), ("aaaa", 1), ("abcd", 4), ("abab", 1), ("aab", 1), ("a", 1)])
def test_nodes_count_where_each_has_as_many_members(hosts: str, nodes: int) -> None:
    assert count_nodes(hosts) == nodes
