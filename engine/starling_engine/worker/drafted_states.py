"""Recurrent states of sequences whose rows had drafts: they move on once it is known which of these are accepted."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.state_replay import StateReplay
from starling_engine.worker.host.batch import FlatBatch, Ints

NOBODY = -1


@dataclass(slots=True)
class OpenRows:
    """Rows with drafts of a step, which began at `starts` [N]. Where `slots` [N] is NOBODY, there is nothing left to do."""

    slots: Ints
    starts: Ints
    on_device: torch.Tensor
    """The slots, [N] int64."""
    replay: StateReplay


class DraftedStates:
    """Keeps what rows with drafts were computed from until their states have taken in what is accepted.

    `send` copies an array to the device of the states.
    """

    def __init__(self, send: Callable[[npt.NDArray[np.int64]], torch.Tensor]) -> None:
        self._send = send
        self._open: list[OpenRows] = []

    def begin(self, step: FlatBatch, meta: AttentionMetadata) -> None:
        """Lets the states of a step's rows with drafts stay as they are; `meta` is that of the layers with a state."""
        rows = np.flatnonzero(step.drafts)
        if not len(rows):
            return
        counts = step.ends - step.starts
        tokens, slots = np.flatnonzero(np.repeat(step.drafts > 0, counts)), step.slots[rows]
        parts = (rows, tokens, slots, np.append(0, counts[rows].cumsum()))
        at, of, on_device, query_start = torch.split(self._send(np.concatenate(parts)), [len(part) for part in parts])
        alone = AttentionMetadata(
            meta.positions.index_select(0, of),
            meta.slot_mapping.index_select(0, of),
            query_start.int(),
            meta.context_lens.index_select(0, at),
            meta.block_tables.index_select(0, at),
            int(counts[rows].max()),
        )
        meta.taken = meta.query_start.diff().index_fill_(0, at, 0)
        meta.replay = StateReplay(of, alone)
        self._open.append(OpenRows(slots, step.starts[rows], on_device, meta.replay))

    def leave(self, slots: Iterable[int]) -> None:
        """Forgets rows of sequences that have left these slots."""
        for each in self._open:
            each.slots[np.isin(each.slots, list(slots))] = NOBODY

    def settle_before(self, step: FlatBatch) -> None:
        """Settles the rows whose sequences go on in a step: where they do, says what was accepted. Positions are exact."""
        begins = dict(zip(step.slots.tolist(), step.starts.tolist(), strict=True)) if self._open else {}
        for each in self._open:
            rows = zip(each.slots.tolist(), each.starts.tolist(), strict=True)
            taken = np.array([begins.get(slot, start) - start for slot, start in rows])
            if taken.any():
                each.replay.settle(self._send(taken).int())
                each.slots[taken > 0] = NOBODY
        self._open = [each for each in self._open if (each.slots != NOBODY).any()]

    def settle(self, lengths: torch.Tensor) -> None:
        """Settles the step that has begun last, by the `lengths` [slots] of all sequences, with the token sampled last."""
        for each in self._open:
            alone = each.replay.alone
            began = alone.context_lens - alone.query_start.diff()
            each.replay.settle((lengths.index_select(0, each.on_device) - 1 - began).int())
        self._open.clear()

    @property
    def is_open(self) -> bool:
        """True while a state has to be settled."""
        return bool(self._open)

    def forget(self) -> None:
        """Drops all of it, with the addresses of weights and states in it: no state takes in what is not settled by now."""
        self._open.clear()
