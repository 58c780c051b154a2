"""Mistral Small 4's experts in FP8, all of a layer in one tensor: their numbers are the codes times the scale of each expert."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine import native
from starling_engine.errors import WeightError
from starling_engine.weights.checkpoint import open_checkpoint, stored_formats
from torch import Tensor

from tests.engine.checkpoints import BASE, edit_json, spread
from tests.engine.models.test_quantized import ROUNDED, answer, difference
from tests.engine.weights.test_loader import TEXT_PARTS, loaded

Tensors = dict[str, Tensor]
LAYER = "model.layers.1.mlp.experts"
STORED = f"language_model.{LAYER}"
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with the numbers, and one with codes, as they are published: with images, and static scales of all of a tensor."""
    make, config, changes, vision = TEXT_PARTS["mistral4"]
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("codes")
    model = make(config(text_config={**BASE, **changes, "moe_intermediate_size": 64}, vision_config=vision))
    spread(model)
    for each in (plain, folder):
        model.save_pretrained(each)
    numbers = load_file(folder / "model.safetensors")
    tensors: Tensors = {}
    for name, tensor in numbers.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj", "self_attn.o_proj.weight")):
            tensors[name] = tensor
            continue
        fused = tensor.dim() == 3
        scale = (tensor.abs().amax((1, 2), keepdim=True) if fused else tensor.abs().amax()) / LARGEST
        scale = scale.bfloat16()
        codes = (tensor / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        inputs = f"{name}_activation_scale" if fused else name.replace("weight", "activation_scale")
        tensors |= {name: codes, f"{name}_scale_inv": scale, inputs: torch.tensor(0.02).bfloat16()}
        numbers[name] = codes.float() * scale.float()
    save_file(tensors, folder / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    method = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    edit_json(folder / "config.json", {"quantization_config": method})
    return plain, folder


def test_a_model_is_that_of_the_numbers(folders: tuple[Path, Path]) -> None:
    plain, folder = folders
    expected = loaded(plain)
    assert torch.equal(loaded(folder), expected)
    if native.load() is not None:
        assert difference(answer(folder, codes=True), expected) < ROUNDED


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_each_expert_has_codes_that_kernels_may_read(projection: str, folders: tuple[Path, Path]) -> None:
    plain, folder = folders
    numbers = load_file(plain / "model.safetensors")
    gate, up = numbers[f"{STORED}.gate_up_proj"][5].chunk(2)
    expected = {"gate_proj": gate, "up_proj": up, "down_proj": numbers[f"{STORED}.down_proj"][5]}[projection]
    name = f"{LAYER}.5.{projection}.weight"
    form, files = stored_formats(folder)[name], open_checkpoint(folder)
    assert form.floats and form.rounding == "static"
    part = (slice(8, 24), slice(16, 48))
    with files.open(files.tensors[name].file) as file:
        assert torch.equal(file.read(name, ()), expected)
        found = file.read_codes(name, part)
    assert torch.equal(found.dequantized(), expected[part])
    assert found.input_scale is not None and found.input_scale == torch.tensor(0.02).bfloat16()


def test_a_scale_of_inputs_may_be_of_an_expert(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    tensors[f"{STORED}.down_proj_activation_scale"] = torch.arange(1.0, 9.0)
    (tmp_path / "config.json").write_bytes((folders[1] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    files = open_checkpoint(tmp_path)
    with files.open(tmp_path / "model.safetensors") as file:
        assert file.read_codes(f"{LAYER}.5.down_proj.weight", ()).input_scale == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{STORED}.down_proj_scale_inv"), "down_proj_scale_inv is missing"),
        (
            lambda tensors: put(tensors, "down_proj_scale_inv", torch.ones(8, 1, 2)),
            r"scale_inv \[8, 1, 2\] has the wrong shape",
        ),
        (lambda tensors: put(tensors, "down_proj_scale_inv", codes(8, 1, 1)), r"down_proj_scale_inv is F8_E4M3 \(expected F32"),
        (
            lambda tensors: put(tensors, "gate_up_proj_activation_scale", torch.ones(7)),
            r"activation_scale \[7\] has the wrong",
        ),
        (lambda tensors: put(tensors, "gate_up_proj", codes(8, 95, 64)), r"gate_up_proj \[8, 95, 64\] has no half of rows"),
        (lambda tensors: put(tensors, "down_proj", codes(64, 64)), r"down_proj \[64, 64\] has the wrong shape"),
        (lambda tensors: put(tensors, "down_proj", codes(8, 64, 32)), r"0\.down_proj\.weight \[64, 32\] \(expected \[64, 64\]\)"),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[[Tensors], object], words: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    change(tensors)
    (tmp_path / "config.json").write_bytes((folders[1] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=words):
        loaded(tmp_path)


def put(tensors: Tensors, name: str, tensor: Tensor) -> None:
    tensors[f"{STORED}.{name}"] = tensor


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)
