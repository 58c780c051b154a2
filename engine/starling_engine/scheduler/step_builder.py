"""A step that the scheduler is planning."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat

from starling_engine.request_state import RequestState
from starling_engine.step import FOLLOWS, OWN, BlockAppend, BlockCopy, NewRequest, StepPlan
from starling_engine.token_packing import pack_tokens


@dataclass(slots=True)
class StepBuilder:
    """A plan that is being made, with the requests behind its rows and their run at that time."""

    step_id: int
    epoch: int
    token_budget: int
    """Tokens that still fit into the step."""
    stages: int
    requests: list[RequestState] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    """Numbers of drafts of the rows up to the last one that has any."""
    drafts: "array[int]" = field(default_factory=lambda: array("i"))
    masked: list[int] = field(default_factory=list)
    """Rows that wait for their masks."""
    new: list[NewRequest] = field(default_factory=list)
    appends: list[BlockAppend] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)

    def add_row(self, request: RequestState, count: int, drafts: Sequence[int] = ()) -> None:
        """Adds a row for the next `count` tokens of `request` and for `drafts` behind its last one.

        Enters the request in its batch slot if the workers do not have it yet.
        """
        if not request.entered:
            self._enter(request)
        start, end = request.planned, request.planned + count
        samples = end == len(request.tokens) + request.pending
        several = self.stages > 1
        self.requests.append(request)
        self.runs.append(request.run)
        self.slots.append(request.slot)
        self.starts.append(FOLLOWS if end > request.given and not several else start)
        self.num_tokens.append(count)
        self.sample.append(samples)
        self.token_budget -= count
        request.planned = end
        if several:
            self.inputs.append(request.tokens[start])
        if samples:
            request.pending += 1
            if request.constraint is not None and request.constraint.restricts(request.pending + len(drafts)):
                self.masked.append(len(self.slots) - 1)
        if drafts:
            self._add_drafts(request, drafts)

    def _add_drafts(self, request: RequestState, drafts: Sequence[int]) -> None:
        """Adds drafts to the last row, which samples."""
        assert OWN not in drafts or (request.constraint is None and self.stages == 1), "masks and stages need drafts that are known"
        count = len(drafts)
        self.num_drafts += [0] * (len(self.slots) - 1 - len(self.num_drafts))
        self.num_drafts.append(count)
        self.drafts.extend(drafts)
        self.num_tokens[-1] += count
        self.token_budget -= count
        request.planned += count
        request.pending += count

    def _enter(self, request: RequestState) -> None:
        request.enter()
        record = request.record
        sampling = None if record.pooling else record.params
        blocks = [list(table) for table in request.blocks.worker_tables]
        tokens = pack_tokens(request.tokens)
        request.given = len(request.tokens)
        self.new.append(NewRequest(request.slot, tokens, request.num_prompt, blocks, record.seed, sampling, record.pooling))

    def rows(self) -> Iterator[tuple[RequestState, int, int, int, int]]:
        """Yields for each row the request, its run, the start (see `StepPlan.starts`), and the numbers of tokens and drafts."""
        return zip(self.requests, self.runs, self.starts, self.num_tokens, chain(self.num_drafts, repeat(0)), strict=False)

    def rows_of(self, request: RequestState) -> Iterator[tuple[int, int]]:
        """Yields the numbers of tokens, and of those that it may sample, of the row of a request's present run."""
        for row, other in enumerate(self.requests):
            if other is request and self.runs[row] == request.run:
                drafts = self.num_drafts[row] if row < len(self.num_drafts) else 0
                yield self.num_tokens[row], 1 + drafts if self.sample[row] else 0

    def drafts_by_row(self) -> list[Sequence[int]]:
        """Returns the drafts of each row."""
        ends = accumulate(drafts for *_, drafts in self.rows())
        return [self.drafts[end - drafts : end] for end, (*_, drafts) in zip(ends, self.rows(), strict=True)]

    @property
    def decodes_only(self) -> bool:
        """True if each row has one token, not counting drafts."""
        return sum(self.num_tokens) == len(self.slots) + len(self.drafts)

    @property
    def rows_without_drafts(self) -> list[int]:
        """Returns each row's tokens, not counting drafts."""
        if not self.drafts:
            return self.num_tokens
        return [count - drafts for _, _, _, count, drafts in self.rows()]

    def plan(self, freed_slots: list[int]) -> StepPlan:
        has_drafts = bool(self.drafts)
        return StepPlan(
            self.step_id,
            self.epoch,
            self.slots,
            self.starts,
            self.num_tokens,
            self.sample,
            self.new,
            self.appends,
            self.copies,
            freed_slots,
            [drafts for *_, drafts in self.rows()] if has_drafts else [],
            pack_tokens(self.drafts) if has_drafts else b"",
            self.masked,
            self.inputs,
        )
