"""The border between the residual stream and a part of a layer."""

from collections.abc import Callable

import torch

from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.layers.norm import Normalise, RMSNorm
from starling_engine.models.build_context import BuildContext
from starling_engine.parallel.rank_part import Rows, whole
from starling_engine.weights.weight_slot import WeightSlot

Close = Callable[[Rows, torch.Tensor], tuple[Rows, torch.Tensor | None]]


class StreamBorder:
    """Norms of attention or feed-forward by their names in the checkpoint: of its input, of its output, of the stream behind it.

    enter  (x, residual) -> (the part's input, the sum of both), as `Normalise`: without a norm of the input both are the sum
    leave  the part's output [T, hidden_size] -> what is added to the stream; may overwrite it
    close  (what is added, residual) -> the same two, or the norm of their sum, and None

    What a part gives, and what is added, may be this rank's part of a sum: where nothing else is done with it, the next norm sums.
    """

    def __init__(self, build: BuildContext, before: str | None, after: str | None, of_sum: str | None = None) -> None:
        norms = [None if name is None else build.norm(name) for name in (before, after, of_sum)]
        self._before, self._after, self._of_sum = norms
        self._scale = build.config.traits.residual_scale
        self._arithmetic = build.arithmetic
        self._rounds = self._before if isinstance(self._before, RMSNorm) and self._before.rounds else None
        self.enter: Normalise = self._sum if self._before is None else self._before.forward
        self.leave: Callable[[Rows], Rows] = _unchanged if self._after is None and self._scale == 1 else self._leave
        self.close: Close = _both if self._of_sum is None else self._close

    @property
    def norm_alone(self) -> RowNorm | None:
        """The norm of the part's input, where the border is that and a sum; else None."""
        plain = self._after is None and self._of_sum is None and self._scale == 1
        return self._before.of_rows if plain and isinstance(self._before, RMSNorm) else None

    def enter_rounded(
        self, x: Rows, residual: torch.Tensor | None, rounding: RowRounding | None
    ) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
        """Does as `enter`, and where the norm's kernel can, rounds the part's input to FP8."""
        if rounding is None or self._rounds is None:
            return self.enter(x, residual)
        return self._rounds.forward_rounded(x, residual, rounding)

    def _sum(self, x: Rows, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = whole(x) if residual is None else self._arithmetic.add(residual, whole(x))
        return total, total

    def _leave(self, out: Rows) -> torch.Tensor:
        out = whole(out)
        if self._after is not None:
            out = self._after.forward(out, None)[0]
        return out if self._scale == 1 else self._arithmetic.multiply(out, self._scale)

    def _close(self, added: Rows, residual: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert self._of_sum is not None
        return self._of_sum.forward(added, residual)[0], None

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        for norm in (self._before, self._after, self._of_sum):
            if norm is not None:
                slots.update(norm.weight_slots())
        return slots


def _both(added: Rows, residual: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    return added, residual


def _unchanged(out: Rows) -> Rows:
    return out
