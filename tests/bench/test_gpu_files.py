"""What the GPU benchmark carries and writes: wheels, and checkpoints of random weights."""

import ast
import json
import math
import re
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from bench.gpu import files
from bench.gpu.gpu_tests import TESTS
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


ROOT = Path(__file__).parents[2]
OURS = {"starling_engine": ROOT / "engine", "bench": ROOT, "tests": ROOT}
BROUGHT = {"jinja2", "numpy", "safetensors", "tokenizers", "torch", "tqdm", "transformers", "triton"}
"""What the machine with the GPU has: what is asked for there, and what that needs itself."""
OPTIONAL = {"flash_attn", "flashinfer"}


def imported(path):
    """Modules that are imported with the file, not in its functions."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            yield from (statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names))


def files_of(module):
    stem = OURS[module.partition(".")[0]].joinpath(*module.split("."))
    return [path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()]


def test_what_is_imported_is_carried_along():
    left = [path for folder in ("engine/starling_engine", "bench/gpu") for path in (ROOT / folder).rglob("*.py")]
    left += [ROOT / "tests/conftest.py", *(path for name in TESTS for path in [*(ROOT / name).rglob("*.py")] or [ROOT / name])]
    seen, others = set(), set()
    while left:
        if (path := left.pop()) in seen:
            continue
        seen.add(path)
        for module in imported(path):
            if (top := module.partition(".")[0]) in OURS:
                left += files_of(module)
            else:
                others.add(top)
    assert "tests/engine/checkpoints.py" in {str(path.relative_to(ROOT)) for path in seen}, "it is imported by tests of kernels"
    assert others - sys.stdlib_module_names - BROUGHT - OPTIONAL <= set(NEEDED.values())


def test_what_is_missing_and_not_carried_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"missing: starling-nowhere; .*--wheels"):
        install(tmp_path, tmp_path / "site", {"pytest": "pytest", "starling-nowhere": "starling_nowhere"})


def test_nothing_is_installed_where_nothing_is_missing(tmp_path, capsys):
    install(tmp_path, tmp_path / "site", {"pytest": "pytest"})
    assert capsys.readouterr().out.strip() == str(tmp_path / "site")
    assert not (tmp_path / "site").exists()
