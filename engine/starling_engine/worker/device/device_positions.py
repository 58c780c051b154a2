"""Positions of a step's rows. The device alone knows how many drafts of the steps before it were accepted."""

from typing import TYPE_CHECKING

import torch

from starling_engine.platforms.triton_support import triton_runs
from starling_engine.worker.device.step_writer import Fields

if TYPE_CHECKING:
    from starling_engine.kernels.sample import Drawn


class DevicePositions:
    """State of `slots` slots, and of one more for padding.

    last     [slots + 1] int64, the token that was sampled last in each slot
    lengths  [slots + 1] int64, tokens of the slot's sequence, that one included; undefined until the first was sampled
    """

    def __init__(self, slots: int, block_size: int, device: torch.device) -> None:
        self._padding = slots
        self._block_size = block_size
        self.in_torch = not triton_runs(device)
        self.last = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.lengths = torch.ones(slots + 1, dtype=torch.int64, device=device)

    def locate(self, f: Fields, tables: torch.Tensor) -> None:
        """Fills in the fields that the device adds, and token ids that it sampled.

        `tables` [G, slots + 1, width] int32, of each KV group.
        """
        if self.in_torch:
            self._locate(f, tables)
            return
        from starling_engine.kernels.locate import locate

        locate(
            ids=f.ids,
            token_rows=f.token_rows,
            query_start=f.query_start,
            slots=f.slots,
            starts=f.starts,
            feed_slots=f.feed_slots,
            feed_at=f.feed_at,
            sampled=f.sampled,
            last=self.last,
            lengths=self.lengths,
            tables=tables,
            positions=f.positions,
            targets=f.targets,
            context_lens=f.context_lens,
            ends=f.ends,
            block_size=self._block_size,
        )

    def _locate(self, f: Fields, tables: torch.Tensor) -> None:
        """Defines the result of the kernel."""
        f.ids.index_copy_(0, f.feed_at, self.last.index_select(0, f.feed_slots))
        starts = torch.where(f.starts < 0, self.lengths.index_select(0, f.slots) - 1, f.starts)
        before = starts - f.query_start[:-1]  # position of a row's token, less its index in the step
        f.context_lens.copy_(before + f.query_start[1:])
        torch.add(torch.arange(len(f.positions), device=before.device), before.index_select(0, f.token_rows), out=f.positions)
        f.ends.copy_(f.positions.index_select(0, f.sampled) + 1)
        slots, pages = f.slots.index_select(0, f.token_rows), f.positions // self._block_size
        offsets, padding = f.positions % self._block_size, slots == self._padding
        for targets, table in zip(f.targets, tables, strict=True):
            blocks = table.view(-1).index_select(0, slots * table.shape[1] + pages)
            targets.copy_((blocks * self._block_size + offsets).masked_fill_(padding, -1))

    def accept(self, f: Fields, out: torch.Tensor, most_drafts: int, drawn: "Drawn | None" = None) -> None:
        """Accepts drafts by the tokens out[:, 0] that were sampled. Writes to out[:, 2] the token behind each: its draft, if any.

        `out` is `DeviceSampler.out` for the step's samples, `most_drafts` that of any row. May be called again for other tokens of
        the same step. Where a step has been `drawn` by Triton, its tokens and logits are written, too.
        """
        if self.in_torch:
            assert drawn is None, "Triton's kernels draw where they run"
            out[:, 2].copy_(self._accept(f, out[:, 0].contiguous(), most_drafts))
            return
        from starling_engine.kernels.accept import accept

        accept(
            out,
            drawn,
            ids=f.ids,
            sampled=f.sampled,
            sampled_slots=f.sampled_slots,
            ends=f.ends,
            first=f.first,
            num_drafts=f.num_drafts,
            last=self.last,
            lengths=self.lengths,
        )

    def _accept(self, f: Fields, chosen: torch.Tensor, most_drafts: int) -> torch.Tensor:
        """Defines the result of the kernel: returns the token behind each of `chosen` [S] int64 in its row."""
        following = f.ids.index_select(0, f.sampled + 1)
        newest = f.first
        if most_drafts:
            offsets = torch.arange(most_drafts, device=chosen.device)
            is_draft = offsets < f.num_drafts[:, None]
            nth = (f.first[:, None] + offsets).clamp_(max=len(chosen) - 1)
            newest = f.first + ((chosen == following)[nth] & is_draft).long().cumprod(1).sum(1)
        slots = f.sampled_slots.index_select(0, newest)
        self.last.index_copy_(0, slots, chosen.index_select(0, newest))
        self.lengths.index_copy_(0, slots, f.ends.index_select(0, newest) + 1)
        return following
