"""The recurrent state of a layer in the blocks of the pool, as kernels see it."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of one part of a layer's state (`kv.spec.StatePart`).

    Row r of sequence s is number n = `first` + r among those of all layers. It begins at element n % `per_block` * prod(`shape`) of
    the block `tables[s, column + n // per_block]`.

    storage  [num_blocks, elements] fp32, the blocks of the pool; rows need not be contiguous among each other
    """

    storage: torch.Tensor
    column: int
    per_block: int
    first: int
    rows: int
    shape: tuple[int, ...]

    def read(self, tables: torch.Tensor) -> torch.Tensor:
        """Returns the rows of sequences with block tables [S, width] int32: [S, rows, *shape]."""
        blocks, at = self._places(tables)
        return self.storage[blocks[..., None], at[None, :, None] + self._elements()].view(len(tables), self.rows, *self.shape)

    def write(self, tables: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what `read` returns."""
        blocks, at = self._places(tables)
        self.storage[blocks[..., None], at[None, :, None] + self._elements()] = values.reshape(len(tables), self.rows, -1)

    def _places(self, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the blocks [S, rows] of rows, and the elements [rows] where they begin in them."""
        number = self.first + torch.arange(self.rows, device=tables.device)
        return tables[:, self.column + number // self.per_block].long(), number % self.per_block * math.prod(self.shape)

    def _elements(self) -> torch.Tensor:
        return torch.arange(math.prod(self.shape), device=self.storage.device)


LayerState = tuple[StateRows, ...]
"""A layer's state: its parts, in the order of its `StateSpec`."""
