"""A rank refuses a checkpoint that lies before it builds a model."""

from pathlib import Path

import pytest
from starling_engine.errors import WeightError
from starling_engine.model_config.config import load_model_config
from starling_engine.parallel.absent import absent_ranks
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.weights.checkpoint import check_counts
from starling_engine.worker.setup import RankSetup

from tests.engine.checkpoints import FAMILIES, VARIANTS, edit_json, write_checkpoint
from tests.engine.encoder_checkpoints import ENCODERS, write_encoder
from tests.engine.gguf_files import write_gguf
from tests.engine.workers import plain_worker


def choose(path: Path) -> RankSetup:
    config = plain_worker(model_path=str(path))
    return RankSetup.choose(config, CpuPlatform(), lambda _: absent_ranks(config))


@pytest.mark.parametrize("name", ["qwen3", "mamba2", "gpt-oss", "deepseek-v3"])
def test_layers_that_a_checkpoint_has_not_are_missed_before_any_is_built(name: str, tmp_path: Path) -> None:
    """Building 9,999 takes a minute, and gigabytes."""
    write_checkpoint(tmp_path, (VARIANTS | FAMILIES)[name])
    choose(tmp_path)
    edit_json(tmp_path / "config.json", {"num_hidden_layers": 9999, "layer_types": None, "mlp_layer_types": None})
    with pytest.raises(WeightError, match=r"no tensor is of layer 3 \([a-z.]*layers\.3\), but its config says 9999 layers"):
        choose(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
def test_all_families_have_tensors_in_each_layer(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, (VARIANTS | FAMILIES)[name])
    check_counts(tmp_path, load_model_config(tmp_path))


@pytest.mark.whole
@pytest.mark.parametrize("name", ENCODERS)
def test_so_have_encoders(name: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, ENCODERS[name])
    check_counts(tmp_path, load_model_config(tmp_path))


@pytest.mark.parametrize(("name", "field"), [("qwen3-moe", "num_experts"), ("gpt-oss", "num_local_experts")])
def test_so_are_experts(name: str, field: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS[name])
    choose(tmp_path)
    edit_json(tmp_path / "config.json", {field: 10_000})
    with pytest.raises(WeightError, match=r"layers\.0\.mlp\.\w+\.weight \[\d, 64\] has no 10000 rows, as many as its config has"):
        choose(tmp_path)


def test_so_are_layers_of_a_gguf_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VARIANTS["qwen3"])
    write_gguf(tmp_path / "model.gguf", tmp_path)
    data = (tmp_path / "model.gguf").read_bytes()
    place = data.index(b"qwen3.block_count") + len(b"qwen3.block_count") + 4
    assert data[place : place + 4] == (3).to_bytes(4, "little")
    (tmp_path / "model.gguf").write_bytes(data[:place] + (9999).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(WeightError, match=r"no tensor is of layer 3 \(model\.layers\.3\), but its config says 9999"):
        choose(tmp_path / "model.gguf")
