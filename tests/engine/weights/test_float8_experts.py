"""Experts in FP8, all of a layer in one tensor: their numbers are the codes times the scale of each expert, or of each block."""

from collections.abc import Callable
from copy import deepcopy
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
    model = make(config(text_config=deepcopy({**BASE, **changes, "moe_intermediate_size": 64}), vision_config=vision))
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
    expected = numbers_of_expert(plain, projection)
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


@pytest.fixture(scope="module", params=[(32, 32), (48, 32)], ids=str)
def blocks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with a scale for each block; of the larger ones, some have rows of gates and of ups."""
    rows, columns = request.param
    make, config, changes, vision = TEXT_PARTS["mistral4"]
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("blocks")
    model = make(config(text_config=deepcopy({**BASE, **changes, "moe_intermediate_size": 64}), vision_config=vision))
    spread(model)
    for each in (plain, folder):
        model.save_pretrained(each)
    numbers, tensors = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in numbers.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj", "self_attn.o_proj.weight")):
            tensors[name] = tensor
            continue
        parts = [[part.abs().amax((-2, -1)) for part in row.split(columns, -1)] for row in tensor.split(rows, -2)]
        scales = torch.stack([torch.stack(row, -1) for row in parts], -2) / LARGEST
        of_each = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : tensor.shape[-2], : tensor.shape[-1]]
        codes = (tensor / of_each).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        numbers[name] = codes.float() * of_each
    save_file(tensors, folder / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    edit_json(folder / "config.json", {"quantization_config": method})
    return plain, folder


def test_a_scale_may_be_of_a_block(blocks: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """Kernels take gate and up of one form alone."""
    plain, folder = blocks
    forms = stored_formats(folder)
    assert forms[f"{LAYER}.5.gate_proj.weight"] == forms[f"{LAYER}.5.up_proj.weight"]
    expected = loaded(plain)
    assert torch.equal(loaded(folder), expected)
    if native.load() is not None:
        assert difference(answer(folder, codes=True), expected) < ROUNDED
        assert "dequantized" not in caplog.text


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_rows_of_a_part_have_the_scales_of_their_blocks(projection: str, blocks: tuple[Path, Path]) -> None:
    plain, folder = blocks
    expected = numbers_of_expert(plain, projection)
    name = f"{LAYER}.5.{projection}.weight"
    form, files = stored_formats(folder)[name], open_checkpoint(folder)
    with files.open(files.tensors[name].file) as file:
        whole, part = file.read_codes(name, ()), file.read_codes(name, (slice(8, 24), slice(16, 48)))
    assert torch.equal(part.dequantized(), expected[8:24, 16:48])
    for start in range(0, len(whole.scales), form.block_rows):
        assert (whole.scales[start : start + form.block_rows] == whole.scales[start]).all()


def test_blocks_that_do_not_fit_are_named(blocks: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(blocks[1] / "model.safetensors")
    put(tensors, "down_proj_scale_inv", torch.ones(8, 1, 1))
    (tmp_path / "config.json").write_bytes((blocks[1] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"down_proj_scale_inv \[8, 1, 1\] has the wrong shape"):
        loaded(tmp_path)


def numbers_of_expert(plain: Path, projection: str) -> Tensor:
    """Returns a matrix of expert 5 as the checkpoint in numbers has it."""
    numbers = load_file(plain / "model.safetensors")
    gate, up = numbers[f"{STORED}.gate_up_proj"][5].chunk(2)
    return {"gate_proj": gate, "up_proj": up, "down_proj": numbers[f"{STORED}.down_proj"][5]}[projection]


def put(tensors: Tensors, name: str, tensor: Tensor) -> None:
    tensors[f"{STORED}.{name}"] = tensor


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)
