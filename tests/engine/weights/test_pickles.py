"""Weights in pytorch_model.bin: read when that is asked for, tensors alone, and nothing runs."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from starling_engine import LLM, SamplingParams
from starling_engine.errors import WeightError
from starling_engine.kv_offload.secondary.fingerprint import fingerprint_of
from starling_engine.model_config.config import load_model_config
from starling_engine.weights.checkpoint import open_checkpoint
from starling_engine.weights.loader import load_weights
from starling_engine.weights.projection_files import read_projection_tensors

from tests.engine.checkpoints import VARIANTS, edit_json, write_checkpoint
from tests.engine.real_engine import MODEL
from tests.engine.weights.test_loader import empty_model, loaded, logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in safetensors and, with the same tensors, in a pickle."""
    write_checkpoint(tmp_path, VARIANTS["qwen2"])
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    return tmp_path


def of_pickles(folder: Path) -> torch.Tensor:
    model = empty_model(folder)
    load_weights(model, folder, pickles=True)
    return logits(model)


def test_the_model_is_that_of_its_safetensors(folder: Path) -> None:
    expected = loaded(folder)
    (folder / "model.safetensors").unlink()
    assert torch.equal(of_pickles(folder), expected)
    with pytest.raises(WeightError, match=r"holds weights only as PyTorch pickles .* say --load-format pt"):
        loaded(folder)


def test_several_files_have_an_index(folder: Path) -> None:
    tensors = torch.load(folder / "pytorch_model.bin")
    parts = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(tensors)}
    for path in set(parts.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if parts[name] == path}, folder / path)
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": parts}))
    assert torch.equal(of_pickles(folder), loaded(folder))
    (folder / "pytorch_model-1.bin").unlink()
    with pytest.raises(WeightError, match=r"names pytorch_model-1.bin, which"):
        open_checkpoint(folder, pickles=True)


def test_a_base_model_has_names_without_a_prefix(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    expected = of_pickles(folder)
    tensors = torch.load(folder / "pytorch_model.bin")
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    torch.save(base, folder / "pytorch_model.bin")
    config = load_model_config(folder)
    assert not config.has_lm_head and load_model_config(folder).tie_word_embeddings
    edit_json(folder / "config.json", {"tie_word_embeddings": True})
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "pytorch_model.bin")
    tied = of_pickles(folder)
    torch.save(base, folder / "pytorch_model.bin")
    assert torch.equal(of_pickles(folder), tied) and not torch.equal(tied, expected)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {Path(__file__).parent / 'harmed'}",)


def test_nothing_runs_and_damage_is_named(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    for write, message in (
        (lambda: torch.save({"a": Harmful()}, path), "pytorch_model.bin cannot be read"),
        (lambda: torch.save([torch.zeros(2)], path), "holds other things than tensors"),
        (lambda: torch.save({"a": 3}, path), "holds other things than tensors"),
        (lambda: path.write_bytes(whole[: len(whole) // 2]), "pytorch_model.bin cannot be read"),
        (lambda: path.write_bytes(b""), "pytorch_model.bin cannot be read"),
        (lambda: torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False), "pytorch_model.bin cannot be read"),
        (path.unlink, "holds neither pytorch_model.bin nor"),
    ):
        write()
        with pytest.raises(WeightError, match=message):
            open_checkpoint(folder, pickles=True)
    assert not (Path(__file__).parent / "harmed").exists()


def test_tiers_keep_other_weights_apart(folder: Path) -> None:
    before = fingerprint_of(str(folder), "pt", 0, "float32").digest
    assert before == fingerprint_of(str(folder), "pt", 0, "float32").digest
    tensors = torch.load(folder / "pytorch_model.bin")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    torch.save(tensors, folder / "pytorch_model.bin")
    assert fingerprint_of(str(folder), "pt", 0, "float32").digest != before


def test_an_engine_reads_them(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(str(tmp_path), load_format="pt", **settings) as pickled, LLM(MODEL, **settings) as plain:
        found, expected = (llm.generate(["The os module"], greedy)[0].outputs[0].token_ids for llm in (pickled, plain))
    assert found == expected


def test_a_gguf_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightError, match=r"is a GGUF file, not a folder with pytorch_model.bin"):
        open_checkpoint(tmp_path / "m.gguf", pickles=True)


def test_a_dense_modules_pickle_is_read_when_that_is_asked_for(tmp_path: Path) -> None:
    torch.save({"linear.weight": torch.ones(2, 3)}, tmp_path / "pytorch_model.bin")
    assert read_projection_tensors(tmp_path, pickles=True)["linear.weight"].sum() == 6
    with pytest.raises(WeightError, match=r"no model\.safetensors; with --load-format pt"):
        read_projection_tensors(tmp_path, pickles=False)
