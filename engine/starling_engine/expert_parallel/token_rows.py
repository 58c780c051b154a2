"""Tokens on their way to experts of other ranks: one row of bytes each, so that one exchange carries all of it."""

import torch

ALIGNMENT = 8


class TokenRows:
    """A row has a token's hidden state [hidden_size] of `dtype`, then its weights [top_k] fp32, then its experts [top_k] int32."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, top_k: int) -> None:
        self._dtype = dtype
        self._hidden = hidden_size * dtype.itemsize
        self._weights = -(-self._hidden // ALIGNMENT) * ALIGNMENT
        self._ids = self._weights + 4 * top_k
        self._end = self._ids + 4 * top_k
        self.size = -(-self._end // ALIGNMENT) * ALIGNMENT

    def pack(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, hidden_size], ids [N, top_k], weights [N, top_k] -> [N, size] uint8."""
        rows = torch.empty(len(x), self.size, dtype=torch.uint8, device=x.device)
        for part, values in zip(self.unpack(rows), (x, ids, weights), strict=True):
            part.copy_(values)
        return rows

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, size] uint8 -> x, ids int32 and weights, in the same memory."""
        return (
            rows[:, : self._hidden].view(self._dtype),
            rows[:, self._ids : self._end].view(torch.int32),
            rows[:, self._weights : self._ids].view(torch.float32),
        )
