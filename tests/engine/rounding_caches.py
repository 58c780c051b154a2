"""Answers of transformers with a cache that rounds keys and values, and checkpoints with scales for float8_e4m3fn."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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


Rounding = Callable[[torch.Tensor, float], torch.Tensor]
"""Gives what a cache holds of keys or values, with their scale."""


class RoundingCache(DynamicCache):
    """A cache from which is read what it holds, at once."""

    def __init__(self, scales: Scales, rounded: Rounding) -> None:
        super().__init__()
        self._scales = scales
        self._rounded = rounded

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key_scale, value_scale = self._scales[layer_idx]
        keys, values = self._rounded(key_states, key_scale), self._rounded(value_states, value_scale)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def to_int8(x: torch.Tensor, _: float) -> torch.Tensor:
    """Rounds each 32 numbers to 127ths of the largest, which is a float16."""
    groups = x.reshape(-1, 32).numpy()
    step = (abs(groups).max(1, keepdims=True) / 127).astype("float16").astype("float32")
    return torch.from_numpy(np.rint(groups / step).clip(-127, 127) * step).view(x.shape)


def to_int4(x: torch.Tensor, _: float) -> torch.Tensor:
    """Rounds each 32 numbers to 15ths of the way from the least to the largest; least and step are float16."""
    groups = x.reshape(-1, 32).numpy()
    least = groups.min(1, keepdims=True).astype("float16").astype("float32")
    step = ((groups.max(1, keepdims=True) - least) / 15).astype("float16").astype("float32")
    return torch.from_numpy(np.rint((groups - least) / step).clip(0, 15) * step + least).view(x.shape)


ROUNDINGS: dict[torch.dtype, Rounding] = {
    torch.float8_e4m3fn: to_fp8,
    torch.int8: to_int8,
    torch.uint8: to_int4,
}
"""Roundings by the dtype of the cache's tensors."""


def cache_reference(
    folder: Path, name: str, scales: Scales = ONES, cache: torch.dtype = torch.float8_e4m3fn
) -> tuple[Reference, torch.Tensor]:
    """Writes the variant, with the scales unless they are 1. Its answers with such a cache, and logits of the same without."""
    rounded = ROUNDINGS[cache]
    model = write_checkpoint(folder, VARIANTS[name])
    if scales is not ONES:
        add_scales(folder, scale_tensors(scales))
    prompt = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model.generate(
            prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, past_key_values=RoundingCache(scales, rounded)
        )
        logits, plain = _logits(model, whole, RoundingCache(scales, rounded)), _logits(model, whole, None)
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


def assert_near(logits: torch.Tensor, reference: torch.Tensor, plain: torch.Tensor, far: float = FAR) -> None:
    """`plain` is what there would be without rounding, which changes it by `far` at least."""
    assert (logits - reference).abs().mean() < NEAR
    assert (logits - plain).abs().mean() > far
