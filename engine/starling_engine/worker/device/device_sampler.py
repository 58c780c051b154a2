"""Draws tokens on the device, where they stay for the next step; the step's logits stay for the extra outputs."""

import torch

from starling_engine.sampling.select import SampleOp
from starling_engine.worker.device.step_writer import Fields
from starling_engine.worker.host.sampler import are_finite


class DeviceSampler:
    """Samples at most `rows` rows a step. One slot more is padding's.

    last  [rows + 1] int64, the token that was sampled last in each slot
    out   [rows + 1, 2] int64: the step's tokens, and whether their logits are finite
    """

    def __init__(self, op: SampleOp, rows: int, vocab_size: int, device: torch.device) -> None:
        self._op = op
        self._rows = rows
        self.vocab_size = vocab_size
        self.last = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.out = torch.zeros(rows + 1, 2, dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None

    def logits(self, count: int) -> torch.Tensor:
        """Returns [count, vocab_size] fp32: the newest step's logits, or room for the next step's.

        All steps use the same memory, as recorded ones have to.
        """
        if self._logits is None:
            self._logits = torch.empty(self._rows, self.vocab_size, dtype=torch.float32, device=self.last.device)
        return self._logits[:count]

    def forget(self) -> None:
        """Gives the memory back."""
        self._logits = None

    def sample(self, f: Fields, logits: torch.Tensor) -> None:
        """Draws a token for each row of logits [R, vocab_size] fp32."""
        chosen = self._op(logits, f.sampling_metadata, f.seeds, f.ends)
        self.last.index_copy_(0, f.sampled_slots, chosen)
        out = self.out[: len(chosen)]
        out[:, 0].copy_(chosen)
        out[:, 1].copy_(are_finite(logits, chosen))

    def sample_again(self, f: Fields, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Draws other tokens for some of the step's rows [R] int64, from logits [R, vocab_size]; returns them, [R] int64."""
        metadata = f.sampling_metadata.map(lambda column: column.index_select(0, rows))
        chosen = self._op(logits, metadata, f.seeds.index_select(0, rows), f.ends.index_select(0, rows))
        self.last.index_copy_(0, f.sampled_slots.index_select(0, rows), chosen)
        self.out.index_copy_(0, rows, torch.stack((chosen, are_finite(logits, chosen).long()), 1))
        return chosen
