"""A step that the scheduler is planning."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from starling_engine.request_state import RequestState
from starling_engine.step import GIVEN, BlockAppend, BlockCopy, NewRequest, StepPlan
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
    sampled_in: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    appends: list[BlockAppend] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)

    def add_row(self, request: RequestState, count: int) -> None:
        """Adds a row for the next `count` tokens of `request`; enters it in its batch slot if the workers do not have it yet."""
        if not request.entered:
            self._enter(request)
        start, known = request.planned, len(request.tokens)
        end = start + count
        samples = end == known + request.pending
        self.requests.append(request)
        self.runs.append(request.run)
        self.slots.append(request.slot)
        self.starts.append(start)
        self.num_tokens.append(count)
        self.sampled_in.append(request.last_step if end > request.given else GIVEN)
        self.sample.append(samples)
        self.token_budget -= count
        request.planned = end
        if self.stages > 1:
            self.inputs.append(request.tokens[end - 1])
        if samples:
            request.pending += 1
            request.last_step = self.step_id

    def _enter(self, request: RequestState) -> None:
        request.entered = True
        record = request.record
        sampling = None if record.pooling else record.params
        blocks = [list(table) for table in request.blocks.tables]
        tokens = pack_tokens(request.tokens)
        request.given = len(request.tokens)
        self.new.append(NewRequest(request.slot, tokens, request.num_prompt, blocks, record.seed, sampling, record.pooling))

    def rows(self) -> Iterator[tuple[RequestState, int, int, int]]:
        """Yields for each row the request, its run, the position of its first token and the number of its tokens."""
        return zip(self.requests, self.runs, self.starts, self.num_tokens, strict=True)

    def plan(self, freed_slots: list[int]) -> StepPlan:
        return StepPlan(
            self.step_id,
            self.epoch,
            self.slots,
            self.starts,
            self.num_tokens,
            self.sampled_in,
            self.sample,
            self.new,
            self.appends,
            self.copies,
            freed_slots,
            self.inputs,
        )
