"""Hidden states between pipeline stages."""

import torch

from starling_engine.parallel.communicator import Communicator


class StageLink:
    """Connects a rank to the stages before and after its own.

    Steps keep their order, and sending does not wait, so that stages work on different steps at once.
    """

    def __init__(self, stages: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._stages = stages
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device

    @property
    def first(self) -> bool:
        return self._stages.shard.first

    @property
    def last(self) -> bool:
        return self._stages.shard.last

    def receive(self, num_tokens: int, into: torch.Tensor | None = None) -> torch.Tensor | None:
        """Receives [T, hidden_size] from the stage before, into the first rows of `into` where given; None in the first stage."""
        if self.first:
            return None
        if into is None:
            into = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        return self._stages.receive(into[:num_tokens], self._stages.shard.index - 1)

    def blank(self, num_tokens: int) -> torch.Tensor:
        """Returns zeros, [num_tokens, hidden_size]."""
        return torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)

    def send(self, hidden: torch.Tensor) -> None:
        """Sends [T, hidden_size] to the next stage."""
        self._stages.send(hidden, self._stages.shard.index + 1)
