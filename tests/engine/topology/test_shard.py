"""The arithmetic of splitting."""

from dataclasses import replace
from pathlib import Path

import pytest
from starling_engine.errors import ConfigError
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.model_config.split import check_split
from starling_engine.topology.layout import ParallelLayout
from starling_engine.topology.shard import Shard, Share

from tests.engine.checkpoints import FAMILIES, VARIANTS, write_checkpoint


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_equal_parts_cover_the_whole(count: int) -> None:
    parts = [Shard(index, count).of(12) for index in range(count)]
    assert [i for part in parts for i in range(12)[part.slice]] == list(range(12))
    assert {part.size for part in parts} == {12 // count}


@pytest.mark.parametrize(("whole", "count"), [(5, 2), (5, 4), (512, 3), (7, 7), (1, 2)])
def test_rounded_parts_cover_the_whole_in_order(whole: int, count: int) -> None:
    parts = [Shard(index, count).rounded(whole) for index in range(count)]
    assert [i for part in parts for i in range(whole)[part.slice]] == list(range(whole))
    assert max(part.size for part in parts) == Shard(0, count).rounded_size(whole)


def test_ranks_share_key_value_heads_when_there_are_too_few() -> None:
    assert [Shard(index, 4).heads(2) for index in range(4)] == [Share(0, 1, 2), Share(0, 1, 2), Share(1, 1, 2), Share(1, 1, 2)]
    assert [Shard(index, 2).heads(4).slice for index in range(2)] == [slice(0, 2), slice(2, 4)]


def test_heads_become_columns() -> None:
    assert Share(1, 2, 4).times(16) == Share(16, 32, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, VARIANTS["qwen2"])
    return load_model_config(folder)


@pytest.mark.parametrize("tensor", [3, 8, 5])
def test_a_split_that_cannot_be_names_those_that_can(model: ModelConfig, tensor: int) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size: {tensor} ranks cannot share this model.* possible: 1, 2, 4$"):
        check_split(model, ParallelLayout(tensor=tensor))
    for possible in (1, 2, 4):
        check_split(model, ParallelLayout(tensor=possible))


def test_more_stages_than_layers_are_refused(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size: must be at most 3"):
        check_split(model, ParallelLayout(pipeline=4))


def test_whole_experts_on_each_rank_must_divide(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["mixtral"])
    experts = load_model_config(tmp_path)
    check_split(experts, ParallelLayout(tensor=4), expert_parallel=True)
    write_checkpoint(tmp_path, VARIANTS["mixtral-window"])  # six experts
    with pytest.raises(ConfigError, match=r"the experts of a layer \(6\).* possible: 1, 2$"):
        check_split(load_model_config(tmp_path), ParallelLayout(tensor=4), expert_parallel=True)


def test_key_heads_of_a_gated_delta_net_must_divide(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES["qwen3.5"])  # two of them, and four heads of attention
    check_split(load_model_config(tmp_path), ParallelLayout(tensor=2))
    with pytest.raises(ConfigError, match=r"the key heads of its Gated DeltaNet \(2\).* possible: 1, 2$"):
        check_split(load_model_config(tmp_path), ParallelLayout(tensor=4))


def test_heads_of_mamba2_must_divide_and_groups_may_be_shared(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES["granite-hybrid"])  # eight heads of one group
    model = load_model_config(tmp_path)
    assert model.mamba2 is not None
    check_split(model, ParallelLayout(tensor=4))
    odd = replace(model, mamba2=replace(model.mamba2, groups=3, heads=6))
    with pytest.raises(ConfigError, match=r"heads of its Mamba-2 \(6\).*groups of its Mamba-2 \(3\); possible: 1$"):
        check_split(odd, ParallelLayout(tensor=2))


def test_heads_that_lie_together_are_not_copied(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, FAMILIES["falcon-new"])  # two key-value heads in one matrix with their queries
    check_split(load_model_config(tmp_path), ParallelLayout(tensor=2))
    with pytest.raises(ConfigError, match=r"possible: 1, 2$"):
        check_split(load_model_config(tmp_path), ParallelLayout(tensor=4))


def test_a_model_without_experts_has_none_to_spread(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel: this model has no experts"):
        check_split(model, ParallelLayout(tensor=2), expert_parallel=True)
