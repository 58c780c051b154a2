"""Checkpoints of TorchAO, a folder for each kind: `python -m tests.engine.torchao_checkpoints SOURCE TARGET`.

Beside each checkpoint, `numbers` has the matrices as TorchAO reads them.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torchao import quantization
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from transformers import AutoModelForCausalLM, TorchAoConfig

from tests.engine.checkpoints import edit_json

KINDS: dict[str, Any] = {
    "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
    "int8, activations": lambda: quantization.Int8DynamicActivationInt8WeightConfig(version=2),
    "intx": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32)),
    "fp8": quantization.Float8WeightOnlyConfig,
}


def write(kind: str, source: Path, target: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=TorchAoConfig(KINDS[kind]()))
    model.save_pretrained(target)
    return {
        f"{name}.weight": module.weight.dequantize().contiguous()
        for name, module in model.named_modules()
        if hasattr(getattr(module, "weight", None), "qdata")
    }


def write_int4(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Int4Tensor, whose codes TorchAO makes on GPUs alone: by the rule of its library, here in torch.

    A group's 16 numbers lie from its least to its greatest one. The zero point is the ninth of them.
    """
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors, numbers = load_file(target / "model.safetensors"), {}
    for name in [each for each in tensors if "proj" in each]:
        grouped = tensors[name].float().unflatten(1, (-1, 64))
        least, most = grouped.amin(2), grouped.amax(2)
        scales = ((most - least) / 15).clamp(min=1e-6)
        codes = ((grouped - least[..., None]) / scales[..., None]).round().clamp(0, 15) - 8
        scales, zeros = scales.bfloat16(), (least + 8 * scales).bfloat16()
        numbers[name] = (codes * scales.float()[..., None] + zeros.float()[..., None]).flatten(1)
        flat = codes.flatten(1).to(torch.int8)
        packed = flat[:, ::2] & 15 | flat[:, 1::2] << 4
        sides = scales.T.contiguous(), zeros.T.contiguous()
        tensors[name] = quantization.Int4Tensor(packed, *sides, [1, 64], tensors[name].shape)
    parts, metadata = flatten_tensor_state_dict(tensors)
    save_file(parts, target / "model.safetensors", metadata={"format": "pt", **metadata})
    config = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}}
    edit_json(target / "config.json", {"quantization_config": {"quant_method": "torchao", "quant_type": config}})
    return numbers


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    for kind in (*KINDS, "int4"):
        folder = target / kind
        folder.mkdir(parents=True)
        save_file(write_int4(source, folder) if kind == "int4" else write(kind, source, folder), folder / "numbers")


if __name__ == "__main__":
    main()
