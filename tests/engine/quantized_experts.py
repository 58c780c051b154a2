"""Models of experts in other people's formats: what a tool made of a dense model's layers becomes the experts of fewer layers."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.checkpoints import Variant, edit_json, write_checkpoint
from tests.engine.quantized_checkpoints import Writer, write_quantized
from tests.engine.written import copy_tokenizer

EXPERTS, LAYERS = 4, 2
_SIZES = {"hidden_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
DENSE = Variant("qwen3", {**_SIZES, "intermediate_size": 256, "num_hidden_layers": EXPERTS * LAYERS})
"""A dense model whose rows are whole blocks of each format, also for one of two ranks."""
LATENT = Variant(
    "deepseek_v3",
    {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 3,
        "hidden_size": 256,
        "intermediate_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
)
"""The same with latent attention."""
SPARSE = Variant("qwen3_moe", {**_SIZES, "moe_intermediate_size": 256, "num_experts": EXPERTS, "num_experts_per_tok": 2})
"""The model of experts with its matrices."""
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def write_dense(writer: Callable[[], Writer], folder: Path, variant: Variant = DENSE) -> None:
    """Writes `folder`/plain, and in `folder`/dense what the writer makes of it."""
    for name in ("plain", "dense"):
        (folder / name).mkdir(parents=True)
    write_checkpoint(folder / "plain", variant)
    copy_tokenizer(folder / "plain")
    write_quantized(writer, folder / "plain", folder / "dense")


def write_in_order(gptq: Path, folder: Path) -> None:
    """Writes a checkpoint of GPTQ with its groups in another order, as desc_act leaves them; it is the same model."""
    shutil.copytree(gptq, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".g_idx")]:
        module = name.removesuffix(".g_idx")
        # Gate and up of an MLP read the same columns, so that GPTQ gives them one order.
        order = torch.randperm(
            len(tensors[f"{module}.scales"]), generator=torch.Generator().manual_seed(len(module.rpartition(".")[0]))
        )
        tensors[f"{module}.scales"] = tensors[f"{module}.scales"][order]
        tensors[name] = order.argsort()[tensors[name].long()].int()
    save_file(tensors, folder / "model.safetensors")
    method = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_json(folder / "config.json", {"quantization_config": {**method, "desc_act": True}})


def write_experts(dense: Path, folder: Path) -> None:
    """Writes the model of experts to `folder`, with the matrices in `dense` as they lie there."""
    write_checkpoint(folder, SPARSE)
    routers = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.endswith("mlp.gate.weight")}
    found = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        match = _OF_LAYER.fullmatch(name)
        if match is None:
            found[name] = tensor
        elif match[2].startswith("mlp."):
            layer, expert = divmod(int(match[1]), EXPERTS)
            found[f"model.layers.{layer}.mlp.experts.{expert}.{match[2].removeprefix('mlp.')}"] = tensor
        elif int(match[1]) < LAYERS:
            found[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in {**found, **routers}.items()}, folder / "model.safetensors")
    config = json.loads((dense / "config.json").read_text())
    edit_json(folder / "config.json", {"quantization_config": config.get("quantization_config"), "dtype": "bfloat16"})
    if (dense / "hf_quant_config.json").exists():
        (folder / "hf_quant_config.json").write_bytes((dense / "hf_quant_config.json").read_bytes())
