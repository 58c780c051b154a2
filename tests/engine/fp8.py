"""What transformers answers where its cache rounds keys and values to float8_e4m3fn, and checkpoints with scales for that."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from tests.engine.checkpoints import PROMPT, STEPS, VARIANTS, VOCAB, Reference, write_checkpoint

Scales = Sequence[tuple[float, float]]
"""Of each layer's keys and values."""

NEAR, FAR = 2e-3, 2e-2
"""On average over all logits: the most that two that round may differ by, and the least by which rounding changes them. A number
that lies on the edge between two others may be rounded to another one after a sum in another order.
"""

ONES: Scales = [(1.0, 1.0)] * 3
SCALES: Scales = [(0.02, 0.003), (0.5, 4.0), (0.015625, 0.01)]
"""Some so small that what is largest does not fit."""


class RoundingCache(DynamicCache):
    """What is read is what fp8 holds, at once."""

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self._scales = scales

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key_scale, value_scale = self._scales[layer_idx]
        return super().update(_rounded(key_states, key_scale), _rounded(value_states, value_scale), layer_idx, *args, **kwargs)


def _rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def fp8_reference(folder: Path, name: str, scales: Scales = ONES) -> tuple[Reference, torch.Tensor]:
    """Writes the variant, with the scales unless they are 1. Its answers with such a cache, and logits of the same without."""
    model = write_checkpoint(folder, VARIANTS[name])
    if scales is not ONES:
        add_scales(folder, scale_tensors(scales))
    prompt = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model.generate(
            prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, past_key_values=RoundingCache(scales)
        )
        logits, plain = _logits(model, whole, RoundingCache(scales)), _logits(model, whole, None)
    return Reference(folder, prompt[0].tolist(), whole[0, PROMPT:].tolist(), logits), plain


def _logits(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache | None) -> torch.Tensor:
    found: torch.Tensor = model(tokens, past_key_values=cache).logits[0].float()
    return found


def scale_tensors(scales: Scales) -> dict[str, torch.Tensor]:
    """Under each of the names, and in each of the forms, that there are."""
    forms = [("self_attn.{}_scale", (1,)), ("self_attn.attn.{}_scale", ()), ("self_attn.{}_proj.{}_scale", (1,))]
    return {
        f"model.layers.{layer}.{name.replace('{}', kind)}": torch.full(shape, scale)
        for layer, (both, (name, shape)) in enumerate(zip(scales, forms, strict=True))
        for kind, scale in zip("kv", both, strict=True)
    }


def add_scales(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def assert_near(logits: torch.Tensor, reference: torch.Tensor, plain: torch.Tensor) -> None:
    """`plain` is what there would be without rounding."""
    assert (logits - reference).abs().mean() < NEAR
    assert (logits - plain).abs().mean() > FAR
