"""The step contract: what the scheduler asks of the workers (StepPlan) and what they answer (StepResult).

The scheduler owns block tables and slots; workers mirror them, so a plan holds only what changed. Rows of a plan are columns
(lists of equal length) because a decode step touches every running request. Plans run in the order of their step_id.
"""

import msgspec

from starling_engine.params import PoolingParams, SamplingParams

GIVEN = -1
"""In `StepPlan.sampled_in`: the row's tokens were sent with the request."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request that enters slot `slot`: also one that was preempted, with its output so far.

    `token_ids` are packed (`starling_engine.tokens`). `blocks[g]` is its block table in KV group g. `num_computed` tokens are in
    the cache already. Positions from `num_prompt` on are output. `adapter_slot` is the place of its LoRA adapter, -1 for none.
    """

    slot: int
    token_ids: bytes
    num_prompt: int
    num_computed: int
    blocks: list[list[int]]
    seed: int
    sampling: SamplingParams | None
    pooling: PoolingParams | None
    adapter_slot: int = -1


class BlockAppend(msgspec.Struct, frozen=True, array_like=True):
    """New blocks at the end of a slot's block table in KV group `group`."""

    slot: int
    group: int
    blocks: list[int]


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy page `source` to `target` in every layer of the group, before the step runs."""

    group: int
    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Row i runs `num_tokens[i]` tokens of slot `slots[i]` from position `starts[i]`.

    sampled_in  per row: GIVEN, or the id of the step that samples the row's last input token: it may be in flight, or known to
                another rank alone
    inputs      per row: its last input token, where workers cannot know what was sampled (several pipeline stages); else empty
    sample      per row: whether the row reaches its last token, so that one more is to be sampled (or the vector pooled)
    dummy       no real work: run only so that collectives of other ranks meet
    """

    step_id: int
    epoch: int
    slots: list[int]
    starts: list[int]
    num_tokens: list[int]
    sampled_in: list[int]
    sample: list[bool]
    new: list[NewRequest] = []
    appends: list[BlockAppend] = []
    copies: list[BlockCopy] = []
    freed_slots: list[int] = []
    inputs: list[int] = []
    dummy: bool = False
    placement: int = 0

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class LogprobRow(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen (or given) token first, then the top k in falling order.

    `rank` is the chosen token's rank among the whole vocabulary, from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RowResult(msgspec.Struct, omit_defaults=True):
    """What one row of the plan gave. `error` pins a fault on this request; the other rows stand."""

    tokens: list[int] = []
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow] | None = None
    pooled: list[float] | None = None
    error: str | None = None


class StepResult(msgspec.Struct):
    """The answer to plan `step_id`, rows in the plan's order. `seconds` is what the step took on the device.

    `error` is set, and `rows` empty, when the step failed as a whole."""

    step_id: int
    epoch: int
    rows: list[RowResult]
    seconds: float = 0.0
    error: str | None = None
