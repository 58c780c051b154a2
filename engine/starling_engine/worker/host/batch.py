"""The worker's persistent input batch: arrays over slots, changed by each plan and never rebuilt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kv.spec import KVGroup
from starling_engine.native.sampling_metadata import GREEDY, sampling_metadata, write_rows
from starling_engine.params import PoolingParams, SamplingParams
from starling_engine.sampling.adjust import Adjuster, needs_adjusting
from starling_engine.step import NewRequest, StepPlan
from starling_engine.token_packing import unpack_tokens

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class SlotState:
    """State of a slot's request beyond the arrays."""

    num_prompt: int
    sampling: SamplingParams | None
    pooling: PoolingParams | None
    adjuster: Adjuster | None
    pooled: torch.Tensor | None = None

    def needs_all_hidden_states(self, start: int) -> bool:
        """Returns whether a step from position `start` needs the hidden states of all its tokens, not just of the last one."""
        if self.pooling is not None:
            return True
        return self.sampling is not None and self.sampling.prompt_logprobs is not None and start < self.num_prompt - 1


@dataclass(slots=True)
class StepInputs:
    """Model inputs of a step: token ids [T] int64, attention metadata of each KV group, and the ends of rows.

    last_token [R] is the flat index of each row's last token, ends [R] the position after it.
    """

    ids: torch.Tensor
    metadata: list[AttentionMetadata]
    last_token: Ints
    ends: Ints


@dataclass(slots=True)
class FlatBatch:
    """A step of R rows and T tokens, flat, on the host.

    slots      [R]
    ids        [T] int32
    positions  [T]
    targets    for each KV group [T], where a token's keys and values go: block * block_size + offset (vLLM's slot_mapping)
    query_end  [R], one past each row's last token
    ends       [R], the position after it
    longest    the most tokens in one row (vLLM's max_query_len)
    """

    slots: Ints
    ids: npt.NDArray[np.int32]
    positions: Ints
    targets: list[Ints]
    query_end: Ints
    ends: Ints
    longest: int

    @property
    def host_lens(self) -> tuple[list[int], list[int]] | None:
        """Query starts and `ends` for `AttentionMetadata.host_lens`; None if every row has one token."""
        return ([0, *self.query_end.tolist()], self.ends.tolist()) if self.longest > 1 else None


class InputBatch:
    """Mirrors the scheduler's decisions. Row arrays are indexed by slot."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.block_size = block_size
        self._eos = eos_token_ids
        width = -(-max_model_len // block_size) + 1
        # Zero pages cost nothing until they are written, so the worst case is reserved at once.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.tables = [np.zeros((max_num_seqs, width), np.int32) for _ in groups]
        self.table_lengths = np.zeros((len(groups), max_num_seqs), np.int64)
        self.sampling_metadata = sampling_metadata([GREEDY] * max_num_seqs).map(torch.Tensor.numpy)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.slot_states: list[SlotState | None] = [None] * max_num_seqs
        self.extra_slots: set[int] = set()
        """Slots that need more than plain sampling: adjusted logits, logprobs, or pooling."""

    @property
    def table_bytes(self) -> int:
        """Bytes of the arrays that grow with the longest request; a slot's pages stay when its request is gone."""
        return self.tokens.nbytes + sum(table.nbytes for table in self.tables)

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            self.leave(slot)
        for new in plan.new:
            self._enter(new)
        for slot, group, blocks in ((a.slot, a.group, a.blocks) for a in plan.appends):
            self._append(slot, group, blocks)
        if plan.inputs:
            ends = np.array(plan.starts) + np.array(plan.num_tokens) - 1
            self.tokens[np.array(plan.slots), ends] = plan.inputs

    def leave(self, slot: int) -> None:
        self.slot_states[slot] = None
        self.extra_slots.discard(slot)

    def _enter(self, new: NewRequest) -> None:
        slot, params = new.slot, new.sampling
        ids = unpack_tokens(new.token_ids)
        self.tokens[slot, : len(ids)] = ids
        self.table_lengths[:, slot] = 0
        for group, blocks in enumerate(new.blocks):
            self._append(slot, group, blocks)
        adjuster = Adjuster(params, new.num_prompt, self._eos) if params is not None and needs_adjusting(params) else None
        self.slot_states[slot] = SlotState(new.num_prompt, params, new.pooling, adjuster)
        self.seed[slot] = new.seed
        if params is not None:
            write_rows(self.sampling_metadata, slot, params)
        if params is None or adjuster or params.logprobs is not None or params.prompt_logprobs is not None:
            self.extra_slots.add(slot)

    def _append(self, slot: int, group: int, blocks: list[int]) -> None:
        at = self.table_lengths[group, slot]
        self.tables[group][slot, at : at + len(blocks)] = blocks
        self.table_lengths[group, slot] = at + len(blocks)

    def slot_state(self, slot: int) -> SlotState:
        state = self.slot_states[slot]
        assert state is not None, f"slot {slot} is planned but empty"
        return state

    def any_needs_all_hidden_states(self, plan: StepPlan) -> bool:
        rows = zip(plan.slots, plan.starts, strict=True) if self.extra_slots else ()
        return any(slot in self.extra_slots and self.slot_state(slot).needs_all_hidden_states(start) for slot, start in rows)

    def gather(self, plan: StepPlan) -> FlatBatch:
        """Gathers the step's tokens, positions and slots in one vectorised pass, for any mix of prompts and decodes."""
        slots = np.array(plan.slots)
        starts = np.array(plan.starts)
        counts = np.array(plan.num_tokens)
        query_end = counts.cumsum()
        longest = int(counts.max())
        if longest == 1:
            rows, positions = slots, starts
        else:
            rows = np.repeat(slots, counts)
            positions = np.arange(query_end[-1]) + np.repeat(starts - query_end + counts, counts)
        size = self.block_size
        page, offset = positions // size, positions % size
        targets = [table[rows, page].astype(np.int64) * size + offset for table in self.tables]
        return FlatBatch(slots, self.tokens[rows, positions], positions, targets, query_end, starts + counts, longest)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Returns the model's inputs, for a model that computes on the host."""
        step = self.gather(plan)
        query_start = torch.zeros(len(step.slots) + 1, dtype=torch.int32)
        query_start[1:] = torch.from_numpy(step.query_end)
        positions, ends = torch.from_numpy(step.positions), torch.from_numpy(step.ends.astype(np.int32))
        width = -(-int(step.ends.max()) // self.block_size)
        metadata = [
            AttentionMetadata(
                positions, torch.from_numpy(targets), query_start, ends, torch.from_numpy(table[step.slots, :width]), step.longest
            )
            for targets, table in zip(step.targets, self.tables, strict=True)
        ]
        for meta in metadata:
            meta.host_lens = step.host_lens
        return StepInputs(torch.from_numpy(step.ids.astype(np.int64)), metadata, step.query_end - 1, step.ends)
