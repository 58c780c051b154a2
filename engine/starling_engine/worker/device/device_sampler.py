"""Draws tokens on the device, where they stay for the next step; the step's logits stay for the extra outputs."""

import torch

from starling_engine.sampling.select import SampleOp
from starling_engine.worker.device.device_positions import DevicePositions
from starling_engine.worker.device.step_writer import Fields
from starling_engine.worker.host.sampler import chosen_logits


class DeviceSampler:
    """Samples at most `most` tokens a step.

    out  [most, 3] int64: the step's tokens, the bits of their logits in fp32, and the token behind each in its row
    """

    def __init__(self, op: SampleOp, most: int, vocab_size: int, positions: DevicePositions) -> None:
        self._op = op
        self._most = most
        self._positions = positions
        self.vocab_size = vocab_size
        self.out = torch.zeros(most, 3, dtype=torch.int64, device=positions.last.device)
        self._logits: torch.Tensor | None = None

    def logits(self, count: int) -> torch.Tensor:
        """Returns [count, vocab_size] fp32: the newest step's logits, or room for the next step's.

        All steps use the same memory, as recorded ones have to.
        """
        if self._logits is None:
            self._logits = torch.empty(self._most, self.vocab_size, dtype=torch.float32, device=self.out.device)
        return self._logits[:count]

    def forget(self) -> None:
        """Gives the memory back."""
        self._logits = None

    def sample(self, f: Fields, logits: torch.Tensor, most_drafts: int) -> None:
        """Draws a token for each row of logits [S, vocab_size] fp32. `most_drafts` is that of any row of the step."""
        out = self.out[: len(f.sampled)]
        if self._positions.in_torch:
            chosen = self._op(logits, f.sampling_metadata, f.seeds, f.ends)
            out[:, 0].copy_(chosen)
            out[:, 1].copy_(_bits(logits, chosen))
            self._positions.accept(f, out, most_drafts)
            return
        from starling_engine.kernels.sample import draw

        self._positions.accept(f, out, most_drafts, draw(logits, f.sampling_metadata, f.seeds, f.ends))

    def accept(self, f: Fields, most_drafts: int) -> None:
        """Accepts drafts by the step's tokens, once others have been sampled again."""
        self._positions.accept(f, self.out[: len(f.sampled)], most_drafts)

    def counts(self, ends: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns which samples, for positions `ends` in `slots`, are up to the one behind the last accepted draft."""
        return ends < self._positions.lengths.index_select(0, slots)

    def sample_again(self, f: Fields, at: torch.Tensor, logits: torch.Tensor) -> None:
        """Draws other tokens for some of the step's samples `at` [R] int64, from logits [R, vocab_size]; `accept` comes next."""
        metadata = f.sampling_metadata.map(lambda column: column.index_select(0, at))
        chosen = self._op(logits, metadata, f.seeds.index_select(0, at), f.ends.index_select(0, at))
        self.out[:, :2].index_copy_(0, at, torch.stack((chosen, _bits(logits, chosen).long()), 1))


def _bits(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns the bits of each chosen token's logit, [S] int32."""
    return chosen_logits(logits, chosen).view(torch.int32)
