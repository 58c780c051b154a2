"""The kernels between a batch's arrays and a step of decodes: they make its inputs, and take its tokens."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from starling_engine.native.bindings import library


class GroupTables(NamedTuple):
    """Block tables of a KV group.

    batch        [slots, width] int32, of all sequences
    fixed        blocks of each sequence; 0: as many as its context takes
    slot_mapping [R] int64, gets block * block_size + offset of each row
    block_tables [R, width] int32, gets the rows' tables
    """

    batch: Tensor
    fixed: int
    slot_mapping: Tensor
    block_tables: Tensor


class DecodeBatch:
    """The addresses of what the kernels read and write: all has to stay where it is.

    slots, starts [R] int64: each row's sequence, and its token's position; below 0: the last one
    tokens        [slots, width] int32 and lengths [slots] int64 of the batch's sequences
    ids, positions, behind [R] int64, query_start [R + 1] and context_lens [R] int32 are written; `behind` are the positions of what
                  is sampled
    """

    def __init__(
        self,
        slots: Tensor,
        starts: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        block_size: int,
        groups: Sequence[GroupTables],
        ids: Tensor,
        positions: Tensor,
        behind: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
    ) -> None:
        wide, narrow = (slots, starts, lengths, ids, positions, behind), (tokens, query_start, context_lens)
        assert all(each.dtype == torch.int64 and each.is_contiguous() for each in wide)
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in narrow)
        words = array("q")
        for group in groups:
            assert group.batch.dtype == group.block_tables.dtype == torch.int32 and group.slot_mapping.dtype == torch.int64
            assert group.batch.is_contiguous() and group.slot_mapping.is_contiguous() and group.block_tables.stride(1) == 1
            words.extend((group.batch.data_ptr(), group.batch.stride(0), group.fixed, group.slot_mapping.data_ptr()))
            words.extend((group.block_tables.data_ptr(), group.block_tables.stride(0)))
        self._slots, self._starts, self._behind = slots.data_ptr(), starts.data_ptr(), behind.data_ptr()
        self._tokens, self._lengths, self._block_size = (tokens.data_ptr(), tokens.stride(0)), lengths.data_ptr(), block_size
        self._groups = words.buffer_info()[0], len(groups)
        self._written = tuple(each.data_ptr() for each in (ids, positions, behind, query_start, context_lens))
        self._kept = (slots, starts, tokens, lengths, words, *groups, ids, positions, behind, query_start, context_lens)

    def gather(self, rows: int) -> None:
        """Makes the inputs of the first `rows` rows."""
        batch = *self._tokens, self._lengths, self._block_size
        library().starling_decode_inputs(self._slots, self._starts, rows, *batch, *self._groups, *self._written)

    def take(self, sampled: Tensor) -> None:
        """Takes the tokens [R] int64 of the first rows, at whose end their sequences end."""
        assert sampled.dtype == torch.int64 and sampled.is_contiguous()
        library().starling_take_tokens(self._slots, self._behind, len(sampled), sampled.data_ptr(), *self._tokens, self._lengths)
