"""Tensors of a module of sentence-transformers, which has a folder of its own below the model's."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from starling_engine.errors import WeightError
from starling_engine.weights.pickle_source import load_pickle

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"


def read_projection_tensors(folder: Path, *, pickles: bool) -> dict[str, torch.Tensor]:
    """Reads a folder's safetensors, or else, with `pickles`, the tensors of its pickle. Raises WeightError."""
    path = folder / SAFETENSORS
    if not path.exists():
        if pickles and (folder / PICKLE).exists():
            return load_pickle(folder / PICKLE, f"{folder.name}/{PICKLE}", mmap=False)
        raise WeightError(f"{folder} holds no {SAFETENSORS}; with --load-format pt {PICKLE} is read")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{folder.name}/{path.name} is damaged or cut short: {error}") from error
