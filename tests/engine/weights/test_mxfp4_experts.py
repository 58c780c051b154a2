"""gpt-oss's experts in MXFP4: their numbers are transformers', in whole and for a rank's part, and damage is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine.errors import WeightError
from starling_engine.native.group_quantized import E2M1, Format
from starling_engine.weights.checkpoint import open_checkpoint, stored_formats
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.engine.checkpoints import VARIANTS, Variant, edit_json, write_checkpoint
from tests.engine.weights.test_loader import loaded

Tensors = dict[str, Tensor]
LAYER = "model.layers.0.mlp.experts"


def in_mxfp4(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[E, N, K] -> blocks [E, N, K / 32, 16] and exponents [E, N, K / 32]: the nearest codes, of no more than 6 each."""
    grouped = numbers.unflatten(2, (-1, 32))
    exponents = (grouped.abs().amax(3, keepdim=True) / 6).log2().ceil()
    table = torch.tensor(E2M1) / 2
    codes = ((grouped / exponents.exp2())[..., None] - table).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8)


def write_pair(plain: Path, folder: Path, variant: Variant = VARIANTS["gpt-oss"]) -> None:
    """Writes the experts in MXFP4 to `folder`, and the numbers that transformers makes of them to `plain`."""
    for each in (plain, folder):
        write_checkpoint(each, variant)
    tensors = load_file(folder / "model.safetensors")
    numbers = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, exponents = in_mxfp4(tensors.pop(name).transpose(1, 2))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, exponents
        numbers[name] = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("mxfp4")
    write_pair(plain, folder)
    return plain, folder


def test_a_model_is_that_of_the_numbers(folders: tuple[Path, Path]) -> None:
    plain, folder = folders
    assert torch.equal(loaded(folder), loaded(plain))


def test_each_matrix_has_codes_that_kernels_may_read(folders: tuple[Path, Path]) -> None:
    plain, folder = folders
    assert set(stored_formats(folder).values()) == {Format(4, 32, table=E2M1)}
    whole = load_file(plain / "model.safetensors")[f"{LAYER}.gate_up_proj"]
    files = open_checkpoint(folder)
    name = f"{LAYER}.5.up_proj.weight"
    with files.open(files.tensors[name].file) as file:
        part = file.read_codes(name, (slice(8, 24), slice(32, 64)))
    assert torch.equal(part.dequantized(), whole[5, 32:64, 17:48:2].T)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}.down_proj_scales"), "down_proj_scales is missing"),
        (
            lambda tensors: put(tensors, "gate_up_proj_scales", torch.zeros(8, 64, 1)),
            r"gate_up_proj_scales is F32 \(expected U8\)",
        ),
        (lambda tensors: put(tensors, "down_proj_scales", zeros(8, 64, 2)), r"down_proj_scales \[8, 64, 2\] has the wrong shape"),
        (
            lambda tensors: put(tensors, "down_proj_blocks", zeros(8, 64, 16)),
            r"down_proj_blocks \[8, 64, 16\] has the wrong shape",
        ),
        (lambda tensors: put(tensors, "gate_up_proj_blocks", zeros(8, 63, 2, 16)), "rows of gate and up, and 16 bytes a group"),
        (lambda tensors: put(tensors, "down_proj_bias", torch.zeros(8, 63)), r"down_proj_bias \[8, 63\] \(expected \[8, 64\]\)"),
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
    tensors[f"{LAYER}.{name}"] = tensor


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)
