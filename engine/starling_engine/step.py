"""The contract between scheduler and workers: a StepPlan goes to the workers, a StepResult comes back.

The scheduler owns block tables and batch slots; workers mirror them, so a plan holds only changes. Rows of a plan are stored as
columns (lists of equal length) because a decode step touches every running request. Plans run in the order of their step_id.
"""

import msgspec

from starling_engine.params import PoolingParams, SamplingParams

GIVEN = -1
"""Value in `StepPlan.sampled_in`: the row's tokens were sent with the request."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request that enters batch slot `slot`: also one that was preempted, with its output so far.

    `token_ids` are packed (`starling_engine.token_packing`). `blocks[g]` is its block table in KV group g. Positions from
    `num_prompt` on are output.
    """

    slot: int
    token_ids: bytes
    num_prompt: int
    blocks: list[list[int]]
    seed: int
    sampling: SamplingParams | None
    pooling: PoolingParams | None


class BlockAppend(msgspec.Struct, frozen=True, array_like=True):
    """New blocks at the end of the block table of batch slot `slot`, in KV group `group`."""

    slot: int
    group: int
    blocks: list[int]


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copies block `source` to block `target` in every layer of the group, before the step runs."""

    group: int
    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Row i runs `num_tokens[i]` tokens of batch slot `slots[i]` from position `starts[i]`.

    sampled_in  per row: GIVEN, or the id of the step that samples the row's last input token; that step may be in flight, or
                its result known to another rank alone
    inputs      per row: its last input token, with several pipeline stages, whose workers do not see what was sampled; else empty
    sample      per row: True when the row reaches its last token, so that the next one is sampled (or the vector pooled)
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

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class LogprobRow(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at a position: the chosen (or given) token first, then the top k in falling order.

    `rank` is the chosen token's rank among the whole vocabulary, from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RowResult(msgspec.Struct, omit_defaults=True):
    """Result of a row of the plan. `error` is a fault of this request alone; the other rows stand."""

    tokens: list[int] = []
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow] | None = None
    pooled: list[float] | None = None
    error: str | None = None


class StepResult(msgspec.Struct):
    """Result of plan `step_id`, rows in the plan's order. `seconds` is the step's time on the device.

    `error` is set, and `rows` empty, when the step failed as a whole.
    """

    step_id: int
    epoch: int
    rows: list[RowResult]
    seconds: float = 0.0
    error: str | None = None
