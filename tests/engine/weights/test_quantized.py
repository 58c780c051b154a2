"""Quantized checkpoints: their numbers are what the tools that wrote them read, in whole and in part, and damage is named."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from starling_engine.errors import WeightError
from starling_engine.model_config.config import load_model_config
from starling_engine.native.group_quantized import Format
from starling_engine.weights.checkpoint import open_checkpoint, stored_formats
from transformers import AutoModelForCausalLM

from tests.engine.checkpoints import Variant, edit_json, write_checkpoint
from tests.engine.quantized_checkpoints import (
    TORCHAO,
    Tensors,
    Writer,
    auto_round,
    bitsandbytes,
    compressed,
    fp8_blocks,
    model_opt,
    torchao,
    write_quantized,
)
from tests.engine.weights.test_loader import PROMPT, loaded
from tests.engine.written import Written, copy_tokenizer

SHAPE = Variant("qwen3", {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 2})
WRITERS: dict[str, tuple[Callable[[], Writer], tuple[int, int] | None]] = {
    "W4A16": (partial(compressed, "W4A16"), (4, 128)),
    "W4A16_ASYM": (partial(compressed, "W4A16_ASYM"), (4, 128)),
    "W3A16": (partial(compressed, "W3A16"), (4, 128)),
    "W8A16": (partial(compressed, "W8A16"), (8, 128)),
    "W8A8": (partial(compressed, "W8A8"), (8, 128)),
    "W4A8": (partial(compressed, "W4A8"), (4, 128)),
    "FP8": (partial(compressed, "FP8"), (8, 128)),
    "FP8_DYNAMIC": (partial(compressed, "FP8_DYNAMIC"), (8, 128)),
    "FP8_BLOCK": (partial(compressed, "FP8_BLOCK"), (8, 128)),
    "NVFP4": (partial(compressed, "NVFP4"), (4, 16)),
    "MXFP4A16": (partial(compressed, "MXFP4A16"), (4, 32)),
    "MXFP8A16": (partial(compressed, "MXFP8A16"), (8, 32)),
    "gptq": (partial(auto_round, "auto_gptq", 4, symmetric=True), (4, 32)),
    "gptq asymmetric": (partial(auto_round, "auto_gptq", 2, symmetric=False), (2, 32)),
    "gptq in 3 bits": (partial(auto_round, "auto_gptq", 3, symmetric=True), (4, 32)),
    "gptq in 8 bits": (partial(auto_round, "auto_gptq", 8, symmetric=True, group=128), (8, 128)),
    "awq": (partial(auto_round, "auto_awq", 4, symmetric=False, group=64), (4, 64)),
    "auto-round": (partial(auto_round, "auto_round:gptqmodel", 4, symmetric=True), (4, 32)),
    "nf4": (partial(bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4"), (4, 64)),
    "fp4 twice": (partial(bitsandbytes, load_in_4bit=True, bnb_4bit_use_double_quant=True), (4, 64)),
    "LLM.int8": (partial(bitsandbytes, load_in_8bit=True), (8, 128)),
    "torchao int8": (partial(torchao, "int8"), (8, 128)),
    "torchao int8, activations": (partial(torchao, "int8, activations"), (8, 128)),
    "torchao intx": (partial(torchao, "intx"), (4, 32)),
    "torchao fp8": (partial(torchao, "fp8"), (8, 128)),
    "torchao int4": (partial(torchao, "int4"), (4, 64)),
    "fp8": (lambda: fp8_blocks, (8, 128)),
    "modelopt": (lambda: model_opt, (4, 16)),
}
"""Writers of each kind, and bits and groups of the codes that kernels get; None where they get numbers."""
ROUNDED = 2**-8
"""Other tools compute numbers in the 8 bits of bfloat16, or in float16; ours are exact."""
OF_CODES = {"nf4": 1 / 254, "fp4 twice": 1 / 254}
"""What codes may differ from numbers, as a share of the largest, where tables are rounded; elsewhere scales alone are."""

Checkpoints = dict[str, tuple[Path, Tensors]]
"""Folders of each kind, with their numbers."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("quantized")
    write_checkpoint(folder / "plain", SHAPE)
    copy_tokenizer(folder / "plain")

    def write(kind: str) -> tuple[Path, Tensors]:
        if kind.startswith("torchao") and not TORCHAO.exists():
            pytest.skip("TorchAO is not here: see `make torchao`")
        (folder / kind).mkdir()
        return folder / kind, write_quantized(WRITERS[kind][0], folder / "plain", folder / kind)

    return Written(write)


@pytest.mark.parametrize("kind", WRITERS)
def test_numbers_are_those_of_the_tool_that_wrote_them(kind: str, written: Checkpoints) -> None:
    folder, expected = written[kind]
    files, form = open_checkpoint(folder), WRITERS[kind][1]
    names = [f"model.layers.{n}.{each}.weight" for n in range(2) for each in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")]
    with files.open(folder / "model.safetensors") as file:
        for name in names:
            numbers, found = file.read(name, ()), files.tensors[name]
            top = numbers.abs().max().item()
            torch.testing.assert_close(numbers, expected[name], rtol=0, atol=ROUNDED * top)
            rows, columns = slice(20, 47), slice(64, 128)
            assert torch.equal(file.read(name, (rows, columns)), numbers[rows, columns])
            assert found.shape == numbers.shape and (found.form and (found.form.bits, found.form.group)) == form
            if found.form is not None:
                codes = file.read_codes(name, ())
                torch.testing.assert_close(codes.dequantized(), numbers, rtol=0, atol=OF_CODES.get(kind, 1e-3) * top)
                assert codes.format == found.form and int(codes.codes.max()) < 1 << found.form.bits
                part = file.read_codes(name, (rows, columns))
                assert torch.equal(part.dequantized(), codes.dequantized()[rows, columns])
    assert stored_formats(folder).keys() == {name for name, info in files.tensors.items() if info.form is not None}


@pytest.mark.parametrize("kind", ["W4A16", "fp8", "modelopt"])
def test_a_whole_model_is_that_of_its_numbers(kind: str, written: Checkpoints) -> None:
    folder, numbers = written[kind]
    plain = folder.parent / "plain"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.load_state_dict({name: tensor for name, tensor in numbers.items() if name in model.state_dict()}, strict=False)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(
        loaded(folder).flatten()[-expected.numel() :], expected, rtol=0, atol=2e-2 * expected.abs().max().item()
    )


def in_order(folder: Path, target: Path, order: torch.Tensor, group_of: torch.Tensor, **config: object) -> str:
    """Copies a checkpoint of GPTQ with the columns of a matrix in another order, and another group for each; returns its name."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors, name = load_file(target / "model.safetensors"), "model.layers.0.mlp.up_proj"
    bits = torch.arange(0, 32, 4)
    codes = (tensors[f"{name}.qweight"][:, None, :] >> bits[:, None] & 15).flatten(0, 1)[order]
    tensors[f"{name}.qweight"] = (codes.view(-1, 8, codes.shape[1]).long() << bits[:, None]).sum(1).to(torch.int32)
    tensors[f"{name}.g_idx"] = group_of.to(torch.int32)
    save_file(tensors, target / "model.safetensors")
    before = json.loads((target / "config.json").read_text())["quantization_config"]
    edit_json(target / "config.json", {"quantization_config": {**before, **config}})
    return f"{name}.weight"


def check_gathered(folder: Path, name: str, expected: torch.Tensor, form: Format) -> None:
    """Asserts that codes, of all columns and of a rank's, are the numbers."""
    files = open_checkpoint(folder)
    assert files.tensors[name].form == form
    with files.open(folder / "model.safetensors") as file:
        found = file.read(name, ())
        top = found.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDED * top)
        half = slice(found.shape[1] // 2, None)
        for columns in (slice(None), half):
            codes = file.read_codes(name, (slice(20, 47), columns))
            assert codes.order is not None and codes.codes.shape == (27, len(codes.order))
            torch.testing.assert_close(codes.dequantized(), found[20:47, columns], rtol=0, atol=1e-3 * top)
        assert codes.format.group == form.block and codes.codes.shape[1] <= 2 * len(found[0, half])


def test_columns_in_another_order_are_gathered(written: Checkpoints, tmp_path: Path) -> None:
    """GPTQ with desc_act: the groups of columns are mixed. Codes in another order, each with its group, are the matrix so."""
    folder, expected = written["gptq"]
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    name = in_order(folder, tmp_path, order, order // 32, desc_act=True)
    check_gathered(tmp_path, name, expected[name][:, order], Format(4, 32, 8, gathered=128, filled=32))


def test_columns_of_compressed_tensors_in_another_order_are_gathered(written: Checkpoints, tmp_path: Path) -> None:
    """actorder "group", which older versions wrote: the group of each column is in weight_g_idx."""
    folder, expected = written["W4A16"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    mixed, shifts = torch.randperm(384, generator=torch.Generator().manual_seed(0)), torch.arange(0, 32, 4)
    for each in [each for each in tensors if each.endswith("weight_packed")]:
        module = each.removesuffix(".weight_packed")
        order = mixed if module == name else torch.arange(tensors[each].shape[1] * 8)
        codes = (tensors[each][:, :, None] >> shifts & 15).flatten(1)[:, order]
        tensors[each] = (codes.unflatten(1, (-1, 8)).long() << shifts).sum(2).to(torch.int32)
        tensors[f"{module}.weight_g_idx"] = (order // 128).to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    edit_json(tmp_path / "config.json", {"quantization_config": config})
    check_gathered(tmp_path, f"{name}.weight", expected[f"{name}.weight"][:, mixed], Format(4, 128, 8, gathered=384, filled=128))
    assert (loaded(tmp_path) - loaded(folder)).abs().max() > 0  # this matrix alone has its columns elsewhere


@pytest.mark.parametrize("kind", ["gptq asymmetric", "gptq in 3 bits", "gptq", "gptq in 8 bits"])
def test_any_zero_point_is_read_in_both_versions(kind: str, written: Checkpoints, tmp_path: Path) -> None:
    """Version 1 is written as GPTQModel does: 1 is taken off all zeros of a word at once, so that 0 borrows; in 3 bits off each."""
    shutil.copytree(written[kind][0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    tensors, bits = load_file(tmp_path / "model.safetensors"), config["bits"]
    zeros = torch.randint(0, 1 << bits, tensors[f"{UP}.scales"].shape)
    zeros[:, :17] = (1 << bits) - 1
    zeros[:, 1:17:3] = 0
    constants = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
    first = packed((zeros - 1) % 8, 3) if bits == 3 else packed(zeros, bits) - constants[bits]
    numbers = []
    for version, words in (("gptq_v2", packed(zeros, bits)), ("gptq", first)):
        save_file({**tensors, f"{UP}.qzeros": words}, tmp_path / "model.safetensors")
        edit_json(tmp_path / "config.json", {"quantization_config": {**config, "sym": False, "checkpoint_format": version}})
        with open_checkpoint(tmp_path).open(tmp_path / "model.safetensors") as file:
            numbers.append(file.read(f"{UP}.weight", ()))
    scales = tensors[f"{UP}.scales"].float().T
    codes = (numbers[0].unflatten(1, (scales.shape[1], -1)) / scales[:, :, None]).round() + zeros.T[:, :, None]
    assert codes.min() == 0 and codes.max() == (1 << bits) - 1
    assert torch.equal(numbers[1], numbers[0])


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, N] -> [R, N bits / 32] int32: one behind the other, the lowest bits first."""
    raw = (codes[:, :, None] >> torch.arange(bits) & 1).flatten(1).to(torch.uint8).numpy()
    return torch.from_numpy(np.packbits(raw, axis=1, bitorder="little")).view(torch.int32)


def test_columns_in_an_order_that_the_config_denies_are_an_error(written: Checkpoints, tmp_path: Path) -> None:
    name = in_order(written["gptq"][0], tmp_path, torch.arange(128), torch.arange(128).flip(0) // 32)
    with (
        open_checkpoint(tmp_path).open(tmp_path / "model.safetensors") as file,
        pytest.raises(WeightError, match=r"desc_act: false"),
    ):
        file.read(name, ())


def test_a_group_that_does_not_exist_is_an_error(written: Checkpoints, tmp_path: Path) -> None:
    name = in_order(written["gptq"][0], tmp_path, torch.arange(128), torch.arange(128) // 25, desc_act=True)
    with (
        open_checkpoint(tmp_path).open(tmp_path / "model.safetensors") as file,
        pytest.raises(WeightError, match=r"g_idx names groups"),
    ):
        file.read(name, ())


def test_the_last_group_may_be_smaller(written: Checkpoints, tmp_path: Path) -> None:
    """GPTQ with 128 columns in groups of 48: two, and one of 32, which is filled up."""
    folder, _ = written["gptq"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj"
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "config.json", {"quantization_config": {**config, "group_size": 48}})
    for each in [each for each in tensors if each.endswith((".scales", ".qzeros", ".g_idx"))]:
        k = tensors[f"{each.rpartition('.')[0]}.qweight"].shape[0] * 8
        tensors[each] = (
            (torch.arange(k) // 48).to(torch.int32) if each.endswith("g_idx") else tensors[each][: -(-k // 48)].contiguous()
        )
    save_file(tensors, tmp_path / "model.safetensors")
    files = open_checkpoint(tmp_path)
    codes = (tensors[f"{name}.qweight"][:, None, :] >> torch.arange(0, 32, 4)[:, None] & 15).flatten(0, 1).T.float() - 8
    expected = codes * tensors[f"{name}.scales"].float()[torch.arange(128) // 48].T
    with files.open(tmp_path / "model.safetensors") as file:
        assert torch.equal(file.read(f"{name}.weight", ()), expected)
        codes = file.read_codes(f"{name}.weight", ())
    assert codes.codes.shape == (384, 144) and torch.equal(codes.dequantized(), expected)


def test_groups_of_any_size_are_filled_up(written: Checkpoints, tmp_path: Path) -> None:
    """W8A8 in groups of 24, of which kernels have 32 columns."""
    shutil.copytree(written["W8A8"][0], tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.down_proj"
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"] * (torch.arange(16) + 1)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float().repeat_interleave(24, 1)
    check_gathered(tmp_path, f"{name}.weight", expected, Format(8, 32, 128, gathered=384, filled=24))


def test_biases_of_zeros_are_left_out(written: Checkpoints, tmp_path: Path) -> None:
    """Older quantizers write them for every matrix."""
    shutil.copytree(written["gptq"][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, f"{UP}.bias": torch.zeros(384)}, tmp_path / "model.safetensors")
    assert torch.equal(loaded(tmp_path), loaded(written["gptq"][0]))
    save_file({**tensors, f"{UP}.bias": torch.ones(384)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"up_proj.bias is not known to this model"):
        loaded(tmp_path)


def test_one_scale_for_a_matrix_and_others_for_its_input(written: Checkpoints, tmp_path: Path) -> None:
    """FP8 as ModelOpt and AutoFP8 write it: scalars without a dimension."""
    shutil.copytree(written["FP8"][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor.float().reshape(()) if name.endswith("_scale") else tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
    assert torch.equal(loaded(tmp_path), loaded(written["FP8"][0]))


def test_zero_points_may_be_bytes(written: Checkpoints, tmp_path: Path) -> None:
    folder, expected = written["W4A16_ASYM"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("zero_point")]:
        words, rows = tensors[name], tensors[f"{name.removesuffix('_zero_point')}_scale"].shape[0]
        codes = (words[:, None, :] >> torch.arange(0, 32, 4)[:, None] & 15).flatten(0, 1)[:rows]
        tensors[name] = (codes - 8).to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path).open(tmp_path / "model.safetensors") as file:
        found = file.read(f"{UP}.weight", ())
    torch.testing.assert_close(found, expected[f"{UP}.weight"], rtol=0, atol=ROUNDED * found.abs().max().item())


def test_a_matrix_may_lie_in_two_files(written: Checkpoints, tmp_path: Path) -> None:
    folder, _ = written["W4A16"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {name: "b" if name.endswith("scale") else "a" for name in tensors}
    for part in ("a", "b"):
        save_file({name: tensor for name, tensor in tensors.items() if parts[name] == part}, tmp_path / f"{part}.safetensors")
    index = {"weight_map": {name: f"{part}.safetensors" for name, part in parts.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(loaded(tmp_path), loaded(folder))


UP = "model.layers.1.mlp.up_proj"
STATE_NAME = "weight.quant_state.bitsandbytes__nf4"


def state(**changes: object) -> torch.Tensor:
    return torch.tensor(
        list(json.dumps({"shape": [384, 128], "quant_type": "nf4", "blocksize": 64, **changes}).encode()), dtype=torch.uint8
    )


def cut(tensors: Tensors, ending: str) -> None:
    tensors[f"{UP}.{ending}"] = tensors[f"{UP}.{ending}"][:-1].contiguous()


def test_a_config_that_merged_adapters_left_behind_is_passed_over(written: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(written["nf4"][0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert load_model_config(tmp_path).quantization is not None
    shutil.copytree(written["nf4"][0].parent / "plain", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path).quantization is None
    assert torch.equal(loaded(tmp_path), loaded(written["nf4"][0].parent / "plain"))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("W4A16", lambda t: t.pop(f"{UP}.weight_scale"), "up_proj.weight_scale is missing"),
        ("W4A16", lambda t: cut(t, "weight_scale"), r"up_proj.weight_scale \[383, 1\] has the wrong shape \(expected \[384, 1\]"),
        ("W4A16", lambda t: cut(t, "weight_packed"), "weight_scale .* has the wrong shape"),
        ("W4A16_ASYM", lambda t: t.pop(f"{UP}.weight_zero_point"), "weight_zero_point is missing"),
        (
            "W8A8",
            lambda t: t.update({f"{UP}.weight": torch.zeros(384, 128)}),
            "is quantized in a way that is not known: weight .F32",
        ),
        ("FP8_DYNAMIC", lambda t: cut(t, "weight_scale"), r"weight_scale \[383, 1\] has the wrong shape"),
        ("fp8", lambda t: cut(t, "weight_scale_inv"), r"weight_scale_inv \[2, 1\] has the wrong shape \(expected \[3, 1\]\)"),
        ("gptq", lambda t: cut(t, "scales"), r"scales \[3, 384\] has the wrong shape \(expected \[4, 384\]\)"),
        ("gptq", lambda t: cut(t, "g_idx"), r"g_idx \[127\] has the wrong shape"),
        ("awq", lambda t: cut(t, "qzeros"), "qzeros .* has the wrong shape"),
        ("nf4", lambda t: cut(t, "weight.absmax"), r"weight.absmax .* has the wrong shape"),
        ("nf4", lambda t: t.pop(f"{UP}.weight.quant_state.bitsandbytes__nf4"), "quant_state.bitsandbytes__nf4 is missing"),
        ("nf4", lambda t: cut(t, "weight.quant_state.bitsandbytes__nf4"), "quant_state that cannot be read"),
        ("LLM.int8", lambda t: cut(t, "SCB"), r"SCB \[383\] has the wrong shape"),
        ("NVFP4", lambda t: cut(t, "weight_scale"), r"weight_scale \[383, 8\] has the wrong shape"),
        (
            "NVFP4",
            lambda t: t.update({f"{UP}.weight_global_scale": torch.ones(7)}),
            r"weight_global_scale \[7\] has the wrong shape",
        ),
        ("gptq", lambda t: t.update({f"{UP}.qweight": torch.zeros(16, dtype=torch.int32)}), r"qweight \[16\] .*2 dimensions"),
        ("gptq", lambda t: t.update({f"{UP}.scales": torch.ones(())}), r"(scales|qweight) .* has the wrong shape"),
        ("gptq", lambda t: t.update({f"{UP}.g_idx": torch.zeros((), dtype=torch.int32)}), r"g_idx \[\] has the wrong shape"),
        ("gptq in 3 bits", lambda t: cut(t, "qweight"), "qweight .* does not hold whole codes of 3 bits"),
        ("awq", lambda t: t.update({f"{UP}.qweight": torch.ones(128, 48)}), r"qweight is F32 \(expected I32\)"),
        (
            "fp8",
            lambda t: t.update({f"{UP}.weight": torch.zeros(1, 384, 128, dtype=torch.float8_e4m3fn)}),
            r"weight .*2 dimensions",
        ),
        (
            "FP8_DYNAMIC",
            lambda t: t.update({f"{UP}.weight_scale": torch.ones(384, 0)}),
            r"weight_scale \[384, 0\] has the wrong shape",
        ),
        ("fp4 twice", lambda t: t.pop(f"{UP}.weight.nested_quant_map"), "nested_quant_map is missing"),
        ("fp4 twice", lambda t: cut(t, "weight.nested_quant_map"), r"nested_quant_map \[255\] has the wrong shape"),
        ("nf4", lambda t: t.update({f"{UP}.weight.quant_state.bitsandbytes__nf4": state(blocksize=float("inf"))}), "quant_state"),
        (
            "nf4",
            lambda t: t.update({f"{UP}.{STATE_NAME}": torch.tensor(list(b"[" * 60_000), dtype=torch.uint8)}),
            "quant_state that cannot be read",
        ),
        (
            "nf4",
            lambda t: t.update({f"{UP}.{STATE_NAME}": torch.zeros(1 << 17, dtype=torch.uint8)}),
            "no U8 of at most 65536 bytes",
        ),
        ("nf4", lambda t: t.update({f"{UP}.{STATE_NAME}": torch.zeros(9)}), "no U8 of at most 65536 bytes"),
        ("torchao int4", lambda t: cut(t, "_weight_zero_point"), r"weight_zero_point \[1, 384\] has the wrong shape"),
        ("torchao intx", lambda t: t.pop(f"{UP}._weight_scale"), "up_proj._weight_scale is missing"),
    ],
)
def test_damage_is_named(
    kind: str, change: Callable[[Tensors], object], message: str, written: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(written[kind][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(WeightError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("{", "description of model.layers.1.mlp.up_proj.weight cannot be read"),
        ("[" * 100_000, "description of model.layers.1.mlp.up_proj.weight cannot be read"),
        (
            '{"_type": "Int4TilePackedTo4dTensor"}',
            "is of TorchAO's Int4TilePackedTo4dTensor, which is not supported",
        ),
        ('{"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_data": "int1"}}}', "int1, which is not supported"),
        ('{"_type": "Float8Tensor", "_data": {"block_size": [0, 1]}}', "block_size .* not two integers above 0"),
    ],
)
def test_what_a_header_says_wrongly_is_named(description: str, message: str, written: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(written["torchao int4"][0], tmp_path, dirs_exist_ok=True)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        metadata = {**file.metadata(), f"{UP}.weight": description}
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(WeightError, match=message):
        open_checkpoint(tmp_path)


def test_zero_points_that_should_not_be_are_an_error(written: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(written["gptq asymmetric"][0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "config.json", {"quantization_config": {**config, "sym": True}})
    with pytest.raises(WeightError, match=r"proj.qzeros has zero points, but the config says sym: true"):
        loaded(tmp_path)


def test_scales_that_float16_cannot_hold_are_an_error(written: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(written["W4A16"][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}.weight_scale"][3] = 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    message = r"up_proj.weight has scales that float16 cannot hold"
    with open_checkpoint(tmp_path).open(tmp_path / "model.safetensors") as file, pytest.raises(WeightError, match=message):
        file.read_codes(f"{UP}.weight", ())


@pytest.mark.parametrize("kind", ["nf4", "W8A8", "gptq asymmetric"])
def test_scales_that_are_small_for_float16_lose_nothing(kind: str, written: Checkpoints, tmp_path: Path) -> None:
    """All weights of a matrix below 1e-7: rows of x are multiplied by the factor, and scales have all their bits."""
    shutil.copytree(written[kind][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (ending,) = (each for each in ("weight.absmax", "weight_scale", "scales") if f"{UP}.{each}" in tensors)
    tensors[f"{UP}.{ending}"] = tensors[f"{UP}.{ending}"].float() * 1e-7
    save_file(tensors, tmp_path / "model.safetensors")
    files = open_checkpoint(tmp_path)
    with files.open(tmp_path / "model.safetensors") as file:
        numbers, codes = file.read(f"{UP}.weight", ()), file.read_codes(f"{UP}.weight", ())
        part = file.read_codes(f"{UP}.weight", (slice(20, 47), slice(64, 128)))
    top, found = numbers.abs().max().item(), codes.dequantized()
    assert 0 < top < 1e-7 and codes.factor < 2**-14
    torch.testing.assert_close(found, numbers, rtol=0, atol=OF_CODES.get(kind, 1e-3) * top)
    assert torch.equal(part.dequantized(), found[20:47, 64:])
    assert (codes.plain.dequantized() - numbers).abs().max() > top / 8  # what float16 would make of them


def test_what_is_not_a_number_is_an_error(written: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(written["fp8"][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}.weight"].view(torch.uint8)[5, 7] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        open_checkpoint(tmp_path).open(tmp_path / "model.safetensors") as file,
        pytest.raises(WeightError, match=r"up_proj.weight holds"),
    ):
        file.read_codes(f"{UP}.weight", ())


def test_groups_that_no_kernel_has_are_numbers(written: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Groups of 8 columns: numbers, as the config of the tool allows. The log says so."""
    shutil.copytree(written["W8A8"][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].expand(-1, 16).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    assert f"{UP}.weight" not in stored_formats(tmp_path)
    assert caplog.messages == [f"dequantized, since no kernel takes groups of their size: {UP}.weight"]
    assert stored_formats(tmp_path)["model.layers.0.mlp.up_proj.weight"] == Format(8, 128, zero=128)
    assert torch.equal(loaded(tmp_path), loaded(written["W8A8"][0]))
