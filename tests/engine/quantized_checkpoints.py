"""Quantized checkpoints as other people's tools write them, and the numbers that those tools read in them."""

import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from tests.engine.checkpoints import edit_json

TORCHAO = Path(os.environ.get("STARLING_CACHE") or Path.home() / ".cache/starling") / "torchao-0.18.0"
"""TorchAO's library; `make torchao` brings it."""

Tensors = dict[str, torch.Tensor]
Writer = Callable[[Path, Path], Tensors]
"""Quantizes the checkpoint in a folder into another one; returns its matrices, by their names, as the tool reads them."""


def _load(folder: Path, **options: object) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model


def compressed(scheme: str) -> Writer:
    """llm-compressor's format, in one of its schemes."""
    from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    def calibrate(module: torch.nn.Module) -> None:
        args, weight, whole = module.quantization_scheme.weights, module.weight.detach().float(), None
        rows, columns = weight.shape
        if args.strategy == "tensor_group":
            whole = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.data.copy_(whole)
        if args.strategy == "block":
            high, wide = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
            blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
            least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            group = {"channel": columns, "tensor": rows * columns}.get(args.strategy, args.group_size)
            grouped = weight.view(1 if args.strategy == "tensor" else rows, -1, group)
            least, most = grouped.amin(2), grouped.amax(2)
        scale, zero = calculate_qparams(least, most, args, global_scale=whole)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))

    def write(source: Path, target: Path) -> Tensors:
        model = _load(source, dtype=torch.bfloat16)
        groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
        apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                calibrate(module)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(target)
        compressor.update_config(target)
        compressor.decompress_model(model)
        return dict(model.state_dict())

    return write


def auto_round(format_: str, bits: int, *, symmetric: bool, group: int = 32) -> Writer:
    """AutoRound's formats, those of GPTQ and AWQ among them."""
    import auto_round as tool
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    def write(source: Path, target: Path) -> Tensors:
        from transformers import AutoTokenizer

        model, tokenizer = _load(source, dtype=torch.float16), AutoTokenizer.from_pretrained(source)
        rounds = tool.AutoRound(model, tokenizer, bits=bits, sym=symmetric, group_size=group, iters=0, disable_opt_rtn=True)
        with mock.patch.object(gc, "collect"):  # for each matrix: it goes through all that tests hold
            rounds.quantize_and_save(str(target / "here"), format=format_)
        (written,) = (target / "here").rglob("config.json")
        shutil.copytree(written.parent, target, dirs_exist_ok=True)
        shutil.rmtree(target / "here")
        return read(target)

    def read(folder: Path) -> Tensors:
        raw = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        packing = config.get("packing_format", config["quant_method"])
        return {
            f"{module}.weight": _numbers(packing, *(raw[f"{module}.{each}"] for each in ("qweight", "qzeros", "scales")))
            for module in (name.removesuffix(".qweight") for name in raw if name.endswith(".qweight"))
        }

    def _numbers(packing: str, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if "awq" in packing:
            return dequantize_gemm(qweight, qzeros, scales, bits, group).T
        layers = qlinear_torch_zp if packing in ("gptq", "auto_round:auto_gptq") else qlinear_torch
        columns = qweight.shape[0] * 32 // bits
        layer = layers.QuantLinear(bits, group, columns, qweight.shape[1], bias=False)
        layer.qweight, layer.qzeros, layer.scales = qweight, qzeros, scales
        return layer(torch.eye(columns)).T

    return write


def bitsandbytes(**options: object) -> Writer:
    """Formats of bitsandbytes, as transformers writes them."""
    import bitsandbytes as tool

    def write(source: Path, target: Path) -> Tensors:
        how = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)
        model = _load(source, dtype=torch.bfloat16, device_map="cpu", quantization_config=how)
        model.save_pretrained(target)
        return {
            f"{name}.weight": _numbers(module.weight)
            for name, module in model.named_modules()
            if isinstance(module, tool.nn.Linear4bit | tool.nn.Linear8bitLt)
        }

    def _numbers(weight: torch.nn.Parameter) -> torch.Tensor:
        if hasattr(weight, "quant_state"):
            return tool.functional.dequantize_4bit(weight.data, weight.quant_state)
        return tool.functional.int8_vectorwise_dequant(weight.data, weight.SCB)

    return write


def torchao(kind: str) -> Writer:
    """TorchAO's formats."""

    def write(source: Path, target: Path) -> Tensors:
        shutil.copytree(_all_of_torchao(source) / kind, target, dirs_exist_ok=True)
        return load_file(target / "numbers")

    return write


@functools.cache
def _all_of_torchao(source: Path) -> Path:
    """Writes all kinds in a process of its own: the library takes seconds to import, and transformers imports it where it is."""
    root, target = Path(__file__).parents[2], source.with_name("torchao")
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.torchao_checkpoints", str(source), str(target)]
    subprocess.run(command, check=True, cwd=root, env={**os.environ, "PYTHONPATH": f"{TORCHAO}:{root}"}, capture_output=True)
    return target


def fp8_blocks(source: Path, target: Path) -> Tensors:
    """DeepSeek's and Qwen's format, whose numbers transformers reads."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    for name in [each for each in tensors if "proj" in each]:
        weight = tensors[name].float()
        scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) / 400 + 0.001
        spread = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_json(target / "config.json", {"quantization_config": method})
    from transformers import FineGrainedFP8Config

    return dict(_load(target, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)).state_dict())


def model_opt(source: Path, target: Path) -> Tensors:
    """ModelOpt's NVFP4: compressed-tensors' with other names, and the last scale the other way round."""
    numbers = compressed("NVFP4A16")(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in [each for each in tensors if each.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        tensors[f"{module}.weight"] = tensors.pop(name)
        tensors[f"{module}.weight_scale_2"] = 1 / tensors.pop(f"{module}.weight_global_scale")
        tensors[f"{module}.input_scale"] = torch.ones(())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    edit_json(target / "config.json", {"quantization_config": None})
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    return numbers


def write_quantized(writer: Callable[[], Writer], source: Path, target: Path) -> Tensors:
    """Calls a writer. What other people's tools warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: tensor.detach().float() for name, tensor in writer()(source, target).items()}
