"""Token embeddings that are not tied to the logits head. A tied one is the head's `lookup` (see `LinearMethod`)."""

import torch
from torch.nn import functional as F

from starling_engine.weights.slot import Slot


class Embedding:
    """A table [vocab_size, hidden_size]."""

    _table: torch.Tensor

    def __init__(self, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._shape = (vocab_size, hidden_size)
        self._dtype = dtype
        self._device = device

    def slots(self) -> dict[str, Slot]:
        return {f"{self._name}.weight": Slot(self._shape, self._load)}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> [T, hidden_size]."""
        return F.embedding(ids, self._table)

    def _load(self, tensor: torch.Tensor) -> None:
        self._table = torch.empty(self._shape, dtype=self._dtype, device=self._device).copy_(tensor)
