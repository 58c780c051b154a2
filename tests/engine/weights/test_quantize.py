"""`quantize_checkpoint`: what it writes is read by transformers and by Starling alike, and what cannot be quantized is named."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine.errors import ConfigError, StarlingError, UnsupportedModel, WeightError
from starling_engine.weights.checkpoint import open_checkpoint
from starling_engine.weights.quantized.writer import SCHEMES, quantize_checkpoint
from transformers import AutoModel, AutoModelForCausalLM, CompressedTensorsConfig

from tests.engine.checkpoints import FAMILIES, VARIANTS, Variant, edit_json, write_checkpoint
from tests.engine.weights.test_loader import PROMPT, loaded

SHAPE = Variant("qwen3", {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32})
BOUNDS = {"W4A16": 1 / 14, "W8A16": 1 / 250, "W8A8": 1 / 250, "FP8_DYNAMIC": 1 / 27}
"""Greatest error of a weight, by the largest of its group: half a step, and what scales in bfloat16 clamp."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_checkpoint(folder, SHAPE, torch.bfloat16)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_reads_the_same_numbers(name: str, source: Path, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    written = quantize_checkpoint(source, tmp_path / "out", scheme)
    plain, files = load_file(source / "model.safetensors"), open_checkpoint(tmp_path / "out")
    assert written < sum(tensor.nbytes for tensor in plain.values()) * 0.8 and (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out/1_Pooling/config.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other people's code warns of is not ours
        how = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=how)
    theirs = model.state_dict()
    with files.open(tmp_path / "out" / "model.safetensors") as file:
        assert files.tensors.keys() == plain.keys()
        for each, weight in plain.items():
            numbers = file.read(each, ()).float()
            torch.testing.assert_close(numbers, theirs[each].float(), rtol=2**-8, atol=1e-6)
            if files.tensors[each].dtype != "BF16":
                groups = weight.float().unflatten(1, (-1, scheme.group or weight.shape[1]))
                error = (numbers - weight.float()).unflatten(1, (-1, scheme.group or weight.shape[1])).abs()
                assert (error.amax(2) <= BOUNDS[name] * groups.abs().amax(2) * 1.05).all()
    with torch.no_grad():
        expected = model.float()(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(loaded(tmp_path / "out"), expected, rtol=0, atol=0.03 * expected.abs().max().item())


@pytest.mark.parametrize(("family", "fused"), [("phi3", ("qkv_proj", "gate_up_proj")), ("glm4", ("gate_up_proj",))])
def test_matrices_that_are_one_tensor_are_quantized_too(family: str, fused: tuple[str, ...], tmp_path: Path) -> None:
    shape = Variant(FAMILIES[family].model_type, {**FAMILIES[family].changes, **SHAPE.changes})
    write_checkpoint(tmp_path / "in", shape, torch.bfloat16)
    edit_json(tmp_path / "in" / "config.json", {"pad_token_id": 0})  # the default is beyond the vocabulary
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", SCHEMES["W4A16"])
    plain, files = load_file(tmp_path / "in/model.safetensors"), open_checkpoint(tmp_path / "out")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other people's code warns of is not ours
        how = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=how)
    theirs = model.state_dict()
    with files.open(tmp_path / "out" / "model.safetensors") as file:
        for each in (name for name in plain if any(part in name for part in fused)):
            torch.testing.assert_close(file.read(each, ()), theirs[each].float(), rtol=2**-8, atol=1e-6)
            assert not torch.equal(theirs[each], plain[each])
    with torch.no_grad():
        expected = model.float()(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(loaded(tmp_path / "out"), expected, rtol=0, atol=0.03 * expected.abs().max().item())


def test_groups_of_zeros_stay_zeros(source: Path, tmp_path: Path) -> None:
    """Float16 has its least number far from 0."""
    shutil.copytree(source, tmp_path / "in")
    tensors = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    for name, scheme in SCHEMES.items():
        quantize_checkpoint(tmp_path / "in", tmp_path / name, scheme)
        with open_checkpoint(tmp_path / name).open(tmp_path / name / "model.safetensors") as file:
            assert not file.read("model.layers.0.mlp.up_proj.weight", ())[3].any()


def test_smaller_groups_lose_less(source: Path, tmp_path: Path) -> None:
    name, errors = "model.layers.0.mlp.down_proj.weight", []
    weight = load_file(source / "model.safetensors")[name].float()
    for group in (128, 32):
        quantize_checkpoint(source, tmp_path / str(group), replace(SCHEMES["W4A16"], group=group))
        with open_checkpoint(tmp_path / str(group)).open(tmp_path / str(group) / "model.safetensors") as file:
            errors.append((file.read(name, ()) - weight).norm().item())
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize(("variant", "left"), [("qwen3-moe", "mlp.gate"), ("deepseek-v3", "kv_b_proj")])
def test_routers_and_latents_stay(variant: str, left: str, tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 32, "moe_intermediate_size": 64}
    write_checkpoint(tmp_path / "in", Variant(VARIANTS[variant].model_type, {**VARIANTS[variant].changes, **sizes}), torch.bfloat16)
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", SCHEMES["W8A8"])
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any(name.endswith(left) for name in ignored) and "lm_head" in ignored
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert {info.dtype for name, info in tensors.items() if ".experts.0." in name} == {"int8"}
    actual, expected = loaded(tmp_path / "out"), loaded(tmp_path / "in")
    assert (actual - expected).norm() < 0.05 * expected.norm()


def test_several_files_have_an_index(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "model.safetensors").unlink()
    halves = [*tensors][: len(tensors) // 2], [*tensors][len(tensors) // 2 :]
    for number, names in enumerate(halves):
        save_file({name: tensors[name] for name in names}, tmp_path / "in" / f"{number}.safetensors")
    where = {name: f"{number}.safetensors" for number, names in enumerate(halves) for name in names}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", SCHEMES["W8A8"])
    quantize_checkpoint(source, tmp_path / "one", SCHEMES["W8A8"])
    assert torch.equal(loaded(tmp_path / "out"), loaded(tmp_path / "one"))


def test_what_cannot_be_quantized_is_named(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "done", SCHEMES["W8A8"])
    write_checkpoint(tmp_path / "narrow", VARIANTS["qwen2"])
    write_checkpoint(tmp_path / "gpt2", FAMILIES["gpt2"])
    AutoModel.from_pretrained(source).save_pretrained(tmp_path / "base")
    cases: list[tuple[Path, Path, type[StarlingError], str]] = [
        (source, tmp_path / "done", ConfigError, "done is not empty"),
        (tmp_path / "done", tmp_path / "a", UnsupportedModel, "quantized already .compressed-tensors"),
        (tmp_path / "narrow", tmp_path / "b", WeightError, "has 64 columns, no groups of 128"),
        (tmp_path / "gpt2", tmp_path / "c", UnsupportedModel, "GPT2LMHeadModel have a column for each output"),
        (tmp_path / "base", tmp_path / "c", UnsupportedModel, "has no head for tokens"),
        (source / "model.safetensors", tmp_path / "c", UnsupportedModel, "is no folder of safetensors"),
    ]
    for path, target, error, message in cases:
        with pytest.raises(error, match=message):
            quantize_checkpoint(path, target, SCHEMES["W4A16"])
    assert not any((tmp_path / name).exists() for name in "abc")
