"""Whole models with an indexer beside what `test_families.py` compares: short contexts, published weights in FP8, and 8 bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine import native
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_quantized import ONLINE
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.models import indexer
from starling_engine.models.decoder import Decoder
from starling_engine.native.group_quantized import quantize
from starling_engine.weights.checkpoint import stored_formats
from starling_engine.weights.loader import load_weights
from transformers import AutoModelForCausalLM, DeepseekV3Config

from tests.engine.checkpoints import BASE, FAMILIES, VOCAB, Variant, edit_json, write_checkpoint
from tests.engine.models.test_decoder import TOLERANCE
from tests.engine.models.test_quantized import PLAIN, difference
from tests.engine.paged_driver import PagedDriver

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
TOP, CHUNKS = 8, (30, 1, 1, 28)
TEXT = torch.randint(0, VOCAB, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
KEPT = (*PLAIN, "lm_head.weight", "weights_proj.weight")
"""Matrices that published checkpoints have in bfloat16, and `kv_b_proj`."""


def answer(path: Path, dtype: torch.dtype = FP32, quantization: str | None = None, *, codes: bool = False) -> torch.Tensor:
    stored = stored_formats(path) if codes else {}
    methods, experts = (each(dtype, CPU, quantization, stored) for each in (select_linear_method, select_experts_method))
    model = Decoder(load_model_config(path), dtype, CPU, methods, TorchMla(), experts_method_selector=experts)
    load_weights(model, path)
    driver = PagedDriver(model, dtype, block_size=8)
    return torch.cat([driver.run([(0, chunk.tolist())])[0].float() for chunk in TEXT.split(CHUNKS)])


def test_short_contexts_are_those_of_dense_attention(tmp_path: Path) -> None:
    """Up to `index_topk` tokens a model answers as DeepSeek-V3 with its weights does, and then otherwise."""
    variant = FAMILIES["deepseek-v3.2"]
    write_checkpoint(tmp_path / "sparse", variant)
    shutil.copytree(tmp_path / "sparse", tmp_path / "wide")
    edit_json(tmp_path / "wide" / "config.json", {"index_topk": len(TEXT)})
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    (tmp_path / "dense").mkdir()
    save_file({name: t for name, t in tensors.items() if ".indexer." not in name}, tmp_path / "dense/model.safetensors")
    config = DeepseekV3Config(**{**BASE, **variant.changes}, architectures=["DeepseekV3ForCausalLM"])
    config.save_pretrained(tmp_path / "dense")
    with torch.inference_mode():
        dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()(TEXT[None]).logits[0]
    torch.testing.assert_close(answer(tmp_path / "wide"), dense, atol=TOLERANCE, rtol=0)
    found = answer(tmp_path / "sparse")
    torch.testing.assert_close(found[:TOP], dense[:TOP], atol=TOLERANCE, rtol=0)
    assert (found[TOP:] - dense[TOP:]).abs().amax(1).min() > 100 * TOLERANCE


def sized(name: str) -> Variant:
    """Rows of whole groups of codes, and a padding token within the vocabulary."""
    changes = {"moe_intermediate_size": 64, "q_lora_rank": 64, "index_head_dim": 32, "pad_token_id": 0}
    return Variant(FAMILIES[name].model_type, {**FAMILIES[name].changes, **changes}, FAMILIES[name].edits)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_weights_in_fp8_blocks_as_they_are_published(name: str, tmp_path: Path) -> None:
    """Those of the indexer are too, but for its heads' weights; the numbers are those that transformers computes with."""
    write_checkpoint(tmp_path, sized(name), BF16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=FP32).eval()
    tensors = load_file(tmp_path / "model.safetensors")
    for each in [each for each, tensor in tensors.items() if tensor.dim() == 2 and not each.endswith(KEPT)]:
        weight = tensors[each].float()
        scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) / 400 + 0.001
        spread = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        tensors[each] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{each}_scale_inv"] = scales
        numbers = tensors[each].float() * spread
        if "experts." not in each or "shared" in each:
            model.get_parameter(each).data.copy_(numbers)
        else:
            place(model, each, numbers)
    assert {"wq_b", "wk"} <= {each.split(".")[-2] for each in tensors if each.endswith("_scale_inv")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    edit_json(tmp_path / "config.json", {"quantization_config": method})
    with torch.inference_mode():
        expected = model(TEXT[None]).logits[0]
    torch.testing.assert_close(answer(tmp_path), expected, atol=TOLERANCE, rtol=0)
    if native.load() is not None:
        assert_alike(tmp_path, tmp_path, codes=True)


def place(model: torch.nn.Module, name: str, numbers: torch.Tensor) -> None:
    """Puts one expert's matrix where transformers has all of them, gate and up in one."""
    module, _, rest = name.partition(".experts.")
    expert, projection, _ = rest.split(".")
    experts = model.get_submodule(f"{module}.experts")
    if projection == "down_proj":
        experts.down_proj.data[int(expert)].copy_(numbers)
    else:
        half = experts.gate_up_proj.data[int(expert)].chunk(2)[projection == "up_proj"]
        half.copy_(numbers)


@pytest.mark.skipif(native.load() is None, reason="this machine has no native kernels")
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_a_model_that_is_quantized_while_it_is_loaded(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sized(name), BF16)
    shutil.copytree(tmp_path, tmp_path / "numbers")
    tensors = load_file(tmp_path / "model.safetensors")
    for each, tensor in tensors.items():
        if tensor.ndim == 2 and not each.endswith((*PLAIN, "weights_proj.weight")):
            form = ONLINE["int8"].cut(0, tensor.shape[1])
            assert form is not None
            tensors[each] = quantize(tensor, form).dequantized().to(BF16)
    save_file(tensors, tmp_path / "numbers" / "model.safetensors")
    assert_alike(tmp_path, tmp_path / "numbers", quantization="int8")


def assert_alike(path: Path, numbers: Path, **settings: Any) -> None:
    """Compares logits before anything is chosen, and the first layer's choice: one token among eight makes a large difference."""
    with pytest.MonkeyPatch.context() as patch:
        choices: list[torch.Tensor] = []
        choose = indexer.choose

        def noted(*args: Any) -> torch.Tensor:
            choices.append(choose(*args))
            return choices[-1]

        patch.setattr(indexer, "choose", noted)
        found = answer(path, BF16, **settings)
        ours, choices = choices, []
        expected = answer(numbers, BF16)
    assert difference(found[:TOP], expected[:TOP]) < 0.06
    full = sum(not layer.shares_choice for layer in load_model_config(path).layers)
    same = [
        len({*mine} & {*theirs} - {-1}) / TOP
        for a, b in zip(ours[::full], choices[::full], strict=True)
        for mine, theirs in zip(a.tolist(), b.tolist(), strict=True)
        if -1 not in theirs
    ]
    assert len(same) > 40 and sum(same) / len(same) > 0.9, same
