"""What the GPU benchmark carries and writes: wheels, and checkpoints of random weights."""

import json
import math
import re

import pytest
from safetensors import safe_open

from bench.gpu import files
from bench.gpu.shapes import model_config
from bench.gpu.wheels import NEEDED, install, pinned


@pytest.mark.parametrize(("shape", "parameters"), [("Llama-3-8B", 8_030_261_248), ("Qwen3-0.6B", 596_049_920)])
def test_checkpoints_have_the_published_number_of_parameters(shape, parameters):
    parts = files.tensor_shapes(model_config(shape, toy=False))
    assert sum(math.prod(tensor) for part in parts for tensor in part.values()) == parameters


def test_an_index_names_the_file_of_every_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FILE_BYTES", 1 << 19)
    model = model_config("Llama-3-8B", toy=True)
    size = files.write_weights(tmp_path, model, room=1 << 30)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    names = {name for part in files.tensor_shapes(model) for name in part}
    assert index["weight_map"].keys() == names
    assert len(set(index["weight_map"].values())) > 1, "too few bytes for a second file"
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / file, "pt") as tensors:
            assert set(tensors.keys()) == {name for name, place in index["weight_map"].items() if place == file}


def test_a_full_disk_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(OSError, match=r"0\.0 GB that are free"):
        files.write_weights(tmp_path, model_config("Llama-3-8B", toy=True), room=1000)
    assert not list(tmp_path.iterdir())


def test_every_wheel_has_its_version():
    assert len(pinned()) == len(NEEDED)
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", each) for each in pinned())


def test_what_is_missing_and_not_carried_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"missing: starling-nowhere; .*--wheels"):
        install(tmp_path, tmp_path / "site", {"pytest": "pytest", "starling-nowhere": "starling_nowhere"})


def test_nothing_is_installed_where_nothing_is_missing(tmp_path, capsys):
    install(tmp_path, tmp_path / "site", {"pytest": "pytest"})
    assert capsys.readouterr().out.strip() == str(tmp_path / "site")
    assert not (tmp_path / "site").exists()
