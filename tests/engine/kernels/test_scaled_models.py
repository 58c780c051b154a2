"""Whole models in FP8 on a GPU's path, with the kernels interpreted.

Their logits are those of transformers' model where rows are rounded before each matrix.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starling_engine.attention.torch_paged import TorchPagedAttention
from starling_engine.kernels import scaled_linear
from starling_engine.kernels.rounded_rows import RowRounding, rounded_in_torch
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear_select import select_linear_method
from starling_engine.model_config.config import load_model_config
from starling_engine.model_config.quantization import Rounding
from starling_engine.models.decoder import Decoder
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.weights.checkpoint import open_checkpoint, stored_formats
from starling_engine.weights.loader import load_weights
from transformers import AutoModelForCausalLM

from tests.engine.checkpoints import Variant, write_checkpoint
from tests.engine.paged_driver import PagedDriver
from tests.engine.quantized_checkpoints import Writer, compressed, fp8_blocks, write_quantized

BF16, CPU = torch.bfloat16, torch.device("cpu")
SHAPE = Variant("qwen3", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 1})
PROMPT = [each % 200 for each in range(3, 80 * 7, 7)]
"""Longer than what a kernel of its own multiplies."""
STATIC = 1 / 448
"""Smaller than a tool would choose: numbers above 1 become 1."""

KINDS: dict[str, tuple[Callable[[], Writer], Rounding]] = {
    "FP8_DYNAMIC": (partial(compressed, "FP8_DYNAMIC"), "token"),
    "FP8": (partial(compressed, "FP8"), "static"),
    "FP8_BLOCK": (partial(compressed, "FP8_BLOCK"), "group"),
    "fp8": (lambda: fp8_blocks, "group"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these put their tensors on the CPU, and the kernels are compiled here")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_rounded_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and gates round what they give: only what attention gives is rounded by itself.

    In 16 bits many numbers fall on another code than in 32. So we may be as far away as transformers is from itself.
    """
    writer, rounding = KINDS[kind]
    plain, folder = tmp_path / "plain", tmp_path / "fp8"
    plain.mkdir()
    folder.mkdir()
    write_checkpoint(plain, SHAPE, BF16)
    write_quantized(writer, plain, folder)
    if rounding == "static":
        tensors = load_file(folder / "model.safetensors")
        tensors |= {name: torch.tensor([STATIC]) for name in tensors if name.endswith("input_scale")}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    forms = set(stored_formats(folder).values())
    assert {form.rounding for form in forms} == {rounding}
    assert all(form.by_row for form in forms) == (rounding != "group")
    calls: list[bool] = []
    rounds = scaled_linear.round_rows
    monkeypatch.setattr(scaled_linear, "round_rows", lambda *args: calls.append(True) or rounds(*args))
    monkeypatch.setenv(INTERPRETED, "1")
    found, again = (_ours(folder) for _ in range(2))
    assert torch.equal(found, again)
    layers = load_model_config(folder).num_layers
    assert len(calls) == 2 * layers  # of two runs
    how = RowRounding(rounding, torch.tensor(STATIC) if rounding == "static" else None)
    rounded, coarse, exact = (_theirs(plain, folder, *each) for each in ((how, torch.float32), (how, BF16), (None, torch.float32)))
    assert difference(found, rounded) < 1.3 * difference(coarse, rounded)
    assert rounding != "static" or difference(found, exact) > 1.5 * difference(found, rounded)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the median over tokens."""
    return ((actual - expected).norm(dim=1) / expected.norm(dim=1)).median().item()


def _ours(folder: Path) -> torch.Tensor:
    stored = stored_formats(folder)
    linear, experts = select_linear_method(BF16, CPU, None, stored), select_experts_method(BF16, CPU, None, stored)
    model = Decoder(load_model_config(folder), BF16, CPU, linear, TorchPagedAttention(), experts_method_selector=experts)
    load_weights(model, folder)
    return PagedDriver(model, BF16, block_size=8).run([(0, PROMPT)])[0].float()


def _theirs(plain: Path, folder: Path, rounding: RowRounding | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the logits of transformers' model with the checkpoint's numbers. Rows are rounded before each matrix with codes."""
    model, files = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype), open_checkpoint(folder)
    with files.open(folder / "model.safetensors") as file, torch.no_grad():
        for name in stored_formats(folder):
            module = model.get_submodule(name.removesuffix(".weight"))
            module.weight.copy_(file.read(name, ()))
            if rounding is not None:
                module.register_forward_pre_hook(
                    lambda _, args: rounded_in_torch(args[0].flatten(0, 1), rounding).numbers()[None].to(dtype)
                )
        return model(torch.tensor([PROMPT])).logits[0].float()


@pytest.mark.parametrize(
    ("rounding", "args"),
    [
        ("token", {"strategy": "token", "dynamic": True}),
        ("group", {"strategy": "group", "group_size": 128, "dynamic": True}),
        ("static", {"strategy": "tensor"}),
    ],
)
def test_rows_are_rounded_as_compressed_tensors_does(rounding: Rounding, args: dict[str, object]) -> None:
    """Its scales are divided in another order, so that a few numbers between two codes fall on the other one."""
    pytest.importorskip("compressed_tensors", reason="a machine with a GPU may lack it")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    theirs = QuantizationArgs(num_bits=8, type="float", **args)
    x, scale = (
        torch.randn(9, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 9)[:, None],
        torch.tensor(0.01),
    )
    how = RowRounding(rounding, scale if rounding == "static" else None)
    scales, zero = (
        (scale, None) if rounding == "static" else compute_dynamic_scales_and_zp(x[None], theirs, torch.nn.Linear(512, 1))
    )
    expected = fake_quantize(x[None], scales, zero, theirs)[0]
    found = rounded_in_torch(x, how).numbers()
    same = (found - expected).abs() <= 1e-6 * expected.abs()
    assert same.float().mean() > 0.999
    torch.testing.assert_close(found, expected, rtol=0.126, atol=1e-5)
