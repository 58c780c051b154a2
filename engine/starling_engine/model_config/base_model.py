"""Checkpoints of a base model: a decoder as transformers' AutoModel saves it, without a head and without `model.` in its names."""

import json
from collections.abc import Collection
from pathlib import Path

PREFIX = "model."
"""Beginning of the names that a checkpoint with a head has for the same tensors."""
_EMBEDDING = "embed_tokens.weight"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


def has_base_names(names: Collection[str]) -> bool:
    """Says if these are the tensors of a base model."""
    return _EMBEDDING in names


def is_base_model(folder: Path) -> bool:
    """Says if the folder's safetensors files are of a base model. What cannot be read is not: the loader says what is wrong."""
    try:
        return has_base_names(_names(folder))
    except (OSError, ValueError, KeyError):
        return False


def _names(folder: Path) -> Collection[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return dict.fromkeys(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    with (folder / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return dict.fromkeys(json.loads(file.read(min(size, _MAX_HEADER_BYTES))))
