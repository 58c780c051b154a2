"""Fingerprints are equal where keys and values are, and nowhere else."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from starling_engine.errors import ModelError
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    rng = np.random.default_rng(0)
    for number in range(2):
        tensors = {f"layers.{i}.w": rng.random((64, 64), np.float32) for i in range(40)}
        save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


def of(folder: Path, load_format: str = "auto", seed: int = 0, dtype: str = "float32") -> bytes:
    return fingerprint_of(str(folder), load_format, seed, dtype).digest


def test_a_copy_by_another_name_is_the_same_model(model: Path) -> None:
    copy = model.with_name("copy")
    shutil.copytree(model, copy)
    assert of(copy) == of(model)
    assert fingerprint_of(str(copy), "auto", 0, "float32").model == "copy"


@pytest.mark.parametrize("layer", [0, 17, 39])
def test_a_fine_tune_of_one_layer_is_another_model(model: Path, layer: int) -> None:
    before = of(model)
    path = model / "model-1.safetensors"
    tensors = load_file(path)
    tensors[f"layers.{layer}.w"] *= np.float32(1.001)
    save_file(tensors, path)
    assert of(model) != before


def test_no_tensor_is_too_small_or_one_of_too_many_to_count(tmp_path: Path) -> None:
    """Any of 5,000 scales counts, by its last bit: a model with many experts has as many."""
    (tmp_path / "config.json").write_text("{}")
    scales = {f"experts.{number:04}.scale": np.ones(1, np.float32) for number in range(5000)}
    save_file(scales, tmp_path / "model.safetensors")
    seen = {of(tmp_path)}
    for number in (1, 2, 4999):
        changed = {f"experts.{number:04}.scale": np.nextafter(np.ones(1, np.float32), np.float32(2))}
        save_file(scales | changed, tmp_path / "model.safetensors")
        seen.add(of(tmp_path))
    assert len(seen) == 4


def test_config_dtype_and_files_count(model: Path) -> None:
    seen = {of(model), of(model, dtype="bfloat16")}
    (model / "config.json").write_text(json.dumps({"hidden_size": 64, "rope_theta": 1e6}))
    seen.add(of(model))
    (model / "model-1.safetensors").unlink()
    seen.add(of(model))
    assert len(seen) == 4


def test_a_seed_counts_where_weights_are_made_up(model: Path) -> None:
    assert of(model, seed=1) == of(model, seed=2)
    assert len({of(model, "dummy", 1), of(model, "dummy", 2), of(model)}) == 3


def snapshot_of(model: Path, hub: Path, commit: str) -> Path:
    folder = hub / "models--org--chat-7b" / "snapshots" / commit
    shutil.copytree(model, folder)
    return folder


def test_a_snapshot_of_the_hub_goes_by_its_commit(model: Path, tmp_path: Path) -> None:
    """A branch that moved leads to another commit."""
    here, there = snapshot_of(model, tmp_path / "here", "c0ffee"), snapshot_of(model, tmp_path / "there", "c0ffee")
    assert fingerprint_of(str(here), "auto", 0, "bfloat16").model == "org/chat-7b@c0ffee"
    assert of(here) == of(there)
    assert len({of(here), of(snapshot_of(model, tmp_path / "here", "decaf0")), of(model)}) == 3


def test_a_snapshot_that_was_edited_is_another_model(model: Path, tmp_path: Path) -> None:
    folder = snapshot_of(model, tmp_path, "c0ffee")
    seen = {of(folder)}
    for theta in (1e5, 1e6):
        (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "rope_theta": theta}))
        seen.add(of(folder))
    tensors = load_file(folder / "model-0.safetensors")
    tensors["layers.3.w"] += np.float32(1)
    save_file(tensors, folder / "model-0.safetensors")
    assert len(seen | {of(folder)}) == 4


@pytest.mark.parametrize("damage", ["config.json", "model-0.safetensors"])
def test_files_that_cannot_be_read_are_an_error(model: Path, damage: str) -> None:
    if damage == "config.json":
        (model / damage).unlink()
    else:
        (model / damage).write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="chat"):
        of(model)
