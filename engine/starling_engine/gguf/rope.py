"""The scaling of a GGUF file's rotary embedding, as a config.json's `rope_scaling` has it."""

import math
import struct
from typing import Any

from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.gguf.metadata import GgufMetadata

DEFAULT_THETA = 10000.0
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3_LOW, _LLAMA3_LENGTH = 1.0, 8192
_LLAMA3_HIGHS = (4.0, 1.0)
"""The band of Llama 3.1's scaling, and that of Llama 4's, of which files have only the factors that follow."""
_NEVER = 1e29
"""Factors above this one are of pairs that are not rotated."""


def read_scaling(data: GgufMetadata) -> dict[str, Any] | None:
    """Raises UnsupportedModel for a scaling that is not known, ModelError for factors that are no numbers."""
    if ROPE_FACTORS in data.file.tensors:
        factors = _factors(data, ROPE_FACTORS)
        return _proportional(factors) or _llama3(data, factors)
    if LONG_FACTORS in data.file.tensors or SHORT_FACTORS in data.file.tensors:
        return _longrope(data)
    # Older files have another name; a factor without a type is linear, as in llama.cpp.
    factor = data.get("rope.scaling.factor", data.get("rope.scale_linear", 0.0))
    kind = data.get("rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none")
    if kind == "none":
        return None
    for name in ("attn_factor", "yarn_ext_factor"):
        if data.get(f"rope.scaling.{name}", 1.0) not in (1.0, -1.0, 0.0):
            raise data.refused(f"rope.scaling.{name}", "is not supported; supported: 1")
    if kind not in ("linear", "yarn"):
        raise data.refused("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": factor}
    return scaling | _yarn(data) if kind == "yarn" else scaling


def _yarn(data: GgufMetadata) -> dict[str, Any]:
    scaling = {name: data.get(f"rope.scaling.yarn_{name}", 0.0) for name in ("beta_fast", "beta_slow")}
    scaling["original_max_position_embeddings"] = data.number("rope.scaling.original_context_length")
    if (attention := data.get("rope.scaling.yarn_attn_factor", 1.0)) not in (1.0, -1.0, 0.0):
        scaling["attention_factor"] = attention
    if data.get("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        scaling |= {"mscale": 1.0, "mscale_all_dim": data.number("rope.scaling.yarn_log_multiplier")}
    return scaling


def _longrope(data: GgufMetadata) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope",
        "long_factor": list(_factors(data, LONG_FACTORS)),
        "short_factor": list(_factors(data, SHORT_FACTORS)),
        "original_max_position_embeddings": data.number("rope.scaling.original_context_length"),
    }
    attention = data.get("rope.scaling.attn_factor")
    return scaling if attention is None else scaling | {"attention_factor": attention}


def _proportional(factors: tuple[float, ...]) -> dict[str, Any] | None:
    """Returns the scaling of Gemma 4, by which the first pairs of a head are rotated and no others; None for other factors."""
    rotated = sum(factor == 1 for factor in factors)
    if not rotated or any(factor < _NEVER for factor in factors[rotated:]):
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _llama3(data: GgufMetadata, factors: tuple[float, ...]) -> dict[str, Any]:
    """Finds the factor of Llama 3.1's or 4's scaling. Raises UnsupportedModel where the file's factors are others."""
    path = data.file.path
    factor, theta = max(factors), data.number("rope.freq_base", DEFAULT_THETA)
    if not all(1 <= each < math.inf for each in factors):
        raise ModelError(f"{path}: {ROPE_FACTORS} must be numbers of at least 1")
    wavelengths = [2 * math.pi * theta ** (index / len(factors)) for index in range(len(factors))]
    for high in _LLAMA3_HIGHS:
        expected = (_llama3_factor(each, factor, high) for each in wavelengths)
        if all(abs(found - wanted) <= 1e-3 * wanted for found, wanted in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LLAMA3_LENGTH,
            }
    raise UnsupportedModel(f"{path}: {ROPE_FACTORS} are not those of Llama 3.1's scaling, or of Llama 4's; no others are supported")


def _llama3_factor(wavelength: float, factor: float, high: float) -> float:
    """Returns by what a frequency is divided (transformers' `_compute_llama3_parameters`)."""
    rotations = _LLAMA3_LENGTH / wavelength
    if high == _LLAMA3_LOW:
        return factor if rotations < high else 1.0
    smooth = min(1.0, max(0.0, (rotations - _LLAMA3_LOW) / (high - _LLAMA3_LOW)))
    return 1 / ((1 - smooth) / factor + smooth)


def _factors(data: GgufMetadata, name: str) -> tuple[float, ...]:
    """Reads a tensor that is one row of numbers."""
    file, tensor = data.file, data.file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{file.path}: {name} is missing")
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ModelError(f"{file.path}: {name} is {tensor.type.name} {list(tensor.shape)}; expected one row of F32")
    return struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor))
