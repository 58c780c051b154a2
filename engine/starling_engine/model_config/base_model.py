"""Checkpoints of a base model: a decoder as transformers' AutoModel saves it, without a head and without `model.` in its names."""

from collections.abc import Collection
from pathlib import Path

from starling_engine.model_config.stored_names import stored_names

PREFIX = "model."
"""Beginning of the names that a checkpoint with a head has for the same tensors."""
_EMBEDDING = "embed_tokens.weight"


def has_base_names(names: Collection[str]) -> bool:
    """Says if these are the tensors of a base model."""
    return _EMBEDDING in names


def is_base_model(folder: Path) -> bool:
    """Says if the folder's files are of a base model. What cannot be read is not: the loader says what is wrong."""
    return has_base_names(stored_names(folder))
