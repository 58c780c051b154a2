"""How many tokens went to each expert of late."""

import torch

PARTS = 8
"""Of a window: it slides by one of them at a time."""


class LoadWindow:
    """Counts over the last `steps` steps, or up to an eighth less."""

    def __init__(self, layers: int, experts: int, steps: int) -> None:
        self._length = max(1, steps // PARTS)
        self._parts = torch.zeros(PARTS, layers, experts, dtype=torch.int64)
        self._step = 0

    def add(self, layer: int, ids: torch.Tensor) -> None:
        """ids [T, top_k] of one layer's tokens, -1 for none."""
        experts = self._parts.shape[2]
        counts = torch.bincount(ids.flatten() + 1, minlength=experts + 1)
        self._parts[self._step // self._length % PARTS, layer] += counts[1:].cpu()

    def loads(self) -> torch.Tensor:
        """[layers, experts] int64."""
        return self._parts.sum(0)

    def clear(self) -> None:
        self._parts.zero_()

    def next_step(self) -> None:
        self._step += 1
        if self._step % self._length == 0:
            self._parts[self._step // self._length % PARTS] = 0
