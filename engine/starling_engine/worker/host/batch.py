"""The worker's persistent input batch: arrays over slots, changed by each plan and never rebuilt."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata, HostLens
from starling_engine.kv.spec import KVGroup, StateGroup
from starling_engine.native.sampling_metadata import GREEDY, sampling_metadata, write_rows
from starling_engine.params import PoolingParams, SamplingParams
from starling_engine.sampling.adjust import Adjuster, needs_adjusting
from starling_engine.step import FOLLOWS, OWN, NewRequest, StepPlan
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
    token_rows: list[bytes] = field(default_factory=list)
    """Packed numbers of the prompt's tokens so far, where each token has some; they lie on the host."""

    def needs_all_hidden_states(self, start: int) -> bool:
        """Returns whether a row from `start` (see `StepPlan.starts`) needs the hidden states of all its tokens, as prompts may."""
        if self.pooling is not None:
            return True
        return self.sampling is not None and self.sampling.prompt_logprobs is not None and 0 <= start < self.num_prompt - 1


@dataclass(slots=True)
class Samples:
    """Samples of a step: S tokens of R rows of the plan.

    rows    [R], their numbers in the plan, ascending
    first   [R], each one's first sample; the others, one behind each draft, come right behind
    drafts  [R], how many drafts each has
    slots   [S]
    tokens  [S], index of the step's token behind which is sampled
    ends    [S], the position of the sampled token
    """

    rows: list[int]
    first: Ints
    drafts: Ints
    slots: Ints
    tokens: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.slots)

    def accepted(self, hits: npt.NDArray[np.bool_]) -> Ints:
        """Returns [R], how many drafts of each row are accepted. `hits` [S]: the sampled token is the row's next draft."""
        if not self.drafts.any():
            return np.zeros_like(self.drafts)
        hits = hits.copy()
        hits[self.first + self.drafts] = False
        misses = np.flatnonzero(~hits)
        return misses[np.searchsorted(misses, self.first)] - self.first

    def unmatched(self, following: Ints) -> list[int]:
        """Returns the rows whose drafts are none. `following` [S]: the token behind each sample in its row."""
        if not self.drafts.any():
            return []
        none = (self.drafts > 0) & (following[self.first] == OWN)
        return [self.rows[nth] for nth in np.flatnonzero(none)]

    def kept(self, accepted: Ints) -> Ints:
        """Returns the samples that count: those up to the one behind the last accepted draft of each row."""
        within = np.arange(len(self)) - np.repeat(self.first, 1 + self.drafts)
        return np.flatnonzero(within <= np.repeat(accepted, 1 + self.drafts))

    def of(self, rows: list[int]) -> Ints:
        """Returns the samples of some rows that are sampled from, those of one row after the other's."""
        own = np.array(self.rows)
        nth = np.searchsorted(own, rows)
        assert np.array_equal(own.take(nth, mode="clip"), rows), "no token is sampled from some of these rows"
        counts = 1 + self.drafts[nth]
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        found: Ints = np.repeat(self.first[nth], counts) + within
        return found


@dataclass(slots=True)
class StepInputs:
    """Model inputs of a step: token ids [T] int64, and attention metadata of each KV group."""

    ids: torch.Tensor
    metadata: list[AttentionMetadata]


@dataclass(slots=True)
class FlatBatch:
    """A step of R rows and T tokens, flat, on the host.

    Positions of a row that FOLLOWS are exact where the host computes. On a device they are what they would be if all drafts in
    flight were accepted.

    slots      [R]
    starts     [R], the position of each row's first token
    drafts     [R], how many of its tokens are drafts
    ids        [T] int32; what a row that FOLLOWS starts with, and drafts that are its OWN, a device has to fill in
    positions  [T]
    query_end  [R], one past each row's last token
    ends       [R], the position after it
    longest    the most tokens in one row (vLLM's max_query_len)
    """

    slots: Ints
    starts: Ints
    drafts: Ints
    ids: npt.NDArray[np.int32]
    positions: Ints
    query_end: Ints
    ends: Ints
    longest: int

    @property
    def host_lens(self) -> HostLens | None:
        """Query starts and `ends` for `AttentionMetadata.host_lens`; None if every row has one token."""
        return self.lens if self.longest > 1 else None

    @property
    def lens(self) -> HostLens:
        """Query starts and `ends`, of any step."""
        return [0, *self.query_end.tolist()], self.ends.tolist()

    def samples(self, rows: list[int]) -> Samples:
        """Returns what is sampled from these rows: one token behind the last that is no draft, and one behind each draft."""
        index = np.array(rows, np.int64)
        drafts = self.drafts[index]
        widths = 1 + drafts
        first = widths.cumsum() - widths
        each = np.repeat(index, widths)
        left = np.repeat(first + drafts, widths) - np.arange(len(each))
        return Samples(rows, first, drafts, self.slots[each], self.query_end[each] - 1 - left, self.ends[each] - left)


class InputBatch:
    """Mirrors the scheduler's decisions. Arrays are indexed by slot."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: tuple[int, ...] = (),
        state: StateGroup | None = None,
    ) -> None:
        self.block_size = block_size
        self._eos = eos_token_ids
        width = -(-max_model_len // block_size) + 1
        # Zero pages cost nothing until they are written, so the worst case is reserved at once.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._state_blocks = 0 if state is None else state.num_blocks
        count = len(groups) + (state is not None)
        self.tables = [np.zeros((max_num_seqs, max(width, self._state_blocks)), np.int32) for _ in range(count)]
        """Block tables of each KV group; that of the recurrent state comes last, where there is one."""
        self.fixed_blocks = [0] * len(groups) + [self._state_blocks] * (state is not None)
        """Number of blocks that any sequence has in each table; 0: as many as its tokens take."""
        self.table_lengths = np.zeros((count, max_num_seqs), np.int64)
        self.sampling_metadata = sampling_metadata([GREEDY] * max_num_seqs).map(torch.Tensor.numpy)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        """Tokens of a slot's sequence, with those that were sampled; on a device, as if all drafts in flight were accepted."""
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

    def leave(self, slot: int) -> None:
        self.slot_states[slot] = None
        self.extra_slots.discard(slot)

    def _enter(self, new: NewRequest) -> None:
        slot, params = new.slot, new.sampling
        ids = unpack_tokens(new.token_ids)
        self.tokens[slot, : len(ids)] = ids
        self.lengths[slot] = len(ids)
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

    def sampling_rows(self, plan: StepPlan) -> list[int]:
        """Returns the rows that sample tokens."""
        return [r for r, wanted in enumerate(plan.sample) if wanted and self.slot_state(plan.slots[r]).pooling is None]

    def gather(self, plan: StepPlan) -> FlatBatch:
        """Gathers the step's tokens and positions in one vectorised pass, for any mix of prompts, decodes and drafts."""
        slots = np.array(plan.slots)
        starts = np.array(plan.starts)
        starts = np.where(starts == FOLLOWS, self.lengths[slots] - 1, starts)
        counts = np.array(plan.num_tokens)
        query_end = counts.cumsum()
        longest = int(counts.max())
        if plan.inputs:
            self.tokens[slots, starts] = plan.inputs
        if longest == 1:
            rows, positions = slots, starts
        else:
            rows = np.repeat(slots, counts)
            positions = np.arange(query_end[-1]) + np.repeat(starts - query_end + counts, counts)
        drafts = np.array(plan.num_drafts, np.int64) if plan.num_drafts else np.zeros(len(slots), np.int64)
        if plan.num_drafts:
            is_draft = np.arange(query_end[-1]) >= np.repeat(query_end - drafts, counts)
            self.tokens[rows[is_draft], positions[is_draft]] = unpack_tokens(plan.drafts)
        return FlatBatch(slots, starts, drafts, self.tokens[rows, positions], positions, query_end, starts + counts, longest)

    def inputs(self, step: FlatBatch) -> StepInputs:
        """Returns the model's inputs, for a model that computes on the host."""
        query_start = torch.zeros(len(step.slots) + 1, dtype=torch.int32)
        query_start[1:] = torch.from_numpy(step.query_end)
        positions, ends = torch.from_numpy(step.positions), torch.from_numpy(step.ends.astype(np.int32))
        used = -(-int(step.ends.max()) // self.block_size)
        rows = [table[step.slots, :used] for table in self.tables]
        if self._state_blocks:
            rows[-1] = self.tables[-1][step.slots, : self._state_blocks]
        metadata = [
            AttentionMetadata(positions, torch.from_numpy(targets), query_start, ends, torch.from_numpy(blocks), step.longest)
            for targets, blocks in zip(self._targets(step), rows, strict=True)
        ]
        for meta in metadata:
            meta.host_lens = step.host_lens
        return StepInputs(torch.from_numpy(step.ids.astype(np.int64)), metadata)

    def _targets(self, step: FlatBatch) -> list[Ints]:
        """Returns for each table [T]: block * block_size + offset, where a token's keys and values go (vLLM's slot_mapping).

        That of a state says nothing.
        """
        size = self.block_size
        rows = step.slots if step.longest == 1 else np.repeat(step.slots, step.ends - step.starts)
        page, offset = step.positions // size, step.positions % size
        return [table[rows, page].astype(np.int64) * size + offset for table in self.tables]

    def accept(self, samples: Samples, accepted: Ints, chosen: npt.NDArray[np.int64]) -> None:
        """Takes what was sampled, [S]. Tokens behind a refused draft lie behind the sequence's end, and are written over."""
        self.tokens[samples.slots, samples.ends] = chosen
        self.expect(samples, accepted)

    def expect(self, samples: Samples, accepted: Ints) -> None:
        """Notes the lengths of sequences of which this many drafts are accepted."""
        last = samples.first + accepted
        self.lengths[samples.slots[last]] = samples.ends[last] + 1
