"""Scales of a cache in fp8, from the checkpoint: one for each layer's keys, and one for its values."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import CONFIG, has_fp8_cache_scales, read_config_json
from starling_engine.weights.checkpoint import open_checkpoint
from starling_engine.weights.source import WeightFiles

NAMES = {
    "key_scale": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "value_scale": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
"""Names below the attention of a layer, as llm-compressor, vLLM and ModelOpt write them, and as older tools did: early
compressed-tensors, and AutoFP8 with one scale for both (vLLM's `maybe_remap_kv_scale_name` and `get_cache_scale`)."""
ENDINGS = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")

logger = logging.getLogger("starling.weights")


class Scaled(Protocol):
    """A layer that caches keys divided by `key_scale`, and values divided by `value_scale`."""

    key_scale: float
    value_scale: float


def load_kv_scales(layers: Mapping[str, Scaled], path: Path, *, pickles: bool = False) -> None:
    """Sets the scales that the checkpoint has, by the name of a layer's attention. Others stay 1; all do where they are not of fp8.

    Raises WeightError naming a scale that is not one positive number.
    """
    if (path / CONFIG).exists() and not has_fp8_cache_scales(read_config_json(path)):
        logger.warning("KV cache in float8_e4m3fn: the checkpoint's scales are of another type, and not taken; all are 1")
        return
    files, count = open_checkpoint(path, pickles=pickles), 0
    for prefix, layer in layers.items():
        for field, names in NAMES.items():
            name = next((full for each in names if (full := f"{prefix}.{each}") in files.tensors), None)
            if name is not None:
                setattr(layer, field, _read(files, name))
                count += 1
    logger.info("KV cache in float8_e4m3fn: %d of %d scales are the checkpoint's, the others 1", count, 2 * len(layers))


def _read(files: WeightFiles, name: str) -> float:
    info = files.tensors[name]
    if math.prod(info.shape) != 1:
        raise WeightError(f"checkpoint: {name} {list(info.shape)} has the wrong shape (expected one number for all heads)")
    with files.open(info.file) as file:
        scale = float(file.read(name, ()).float().item())
    if not 0 < scale < math.inf:
        raise WeightError(f"checkpoint: {name} is {scale}; a scale is a positive number")
    return scale
