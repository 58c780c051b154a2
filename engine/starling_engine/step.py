"""The contract between scheduler and workers: a StepPlan goes to the workers, a StepResult comes back.

The scheduler owns block tables and batch slots; workers mirror them, so a plan holds only changes. Rows of a plan are stored as
columns (lists of equal length), because a decode step touches every running request. Plans run in the order of their step_id.
"""

import msgspec

from starling_engine.params import PoolingParams, SamplingParams

FOLLOWS = -1
"""Value in `StepPlan.starts`: the row starts with the token that was sampled last in its slot, wherever that is."""
OWN = -1
"""Value in `StepPlan.drafts`: the device makes the draft, of the tokens that it has. All drafts of a row are its own, or none."""


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

    A row that FOLLOWS says how many tokens it runs, never where: steps before it may be in flight, and the workers alone know how
    many of their drafts are accepted. So a plan stays valid whatever they accept.

    A draft is a guess of a token that the row will sample. It is accepted when it equals the token drawn for its position, and all
    drafts before it were accepted. Where the device finds nothing for its OWN drafts, there are none: the row samples one token. A
    column of drafts or inputs is empty where no row needs it.

    sample      per row: True when the row reaches its last token: it samples behind that, and behind each draft (or its vector is
                pooled)
    num_drafts  per row: how many of its tokens are drafts, the last of them
    drafts      the drafts of one row after the other, packed (`starling_engine.token_packing`): tokens, or OWN
    masked      rows that sample only what their mask allows; the masks come while the step runs (`StepMasks`), and are made for
                drafts that are known: none is OWN
    inputs      per row: its first input token, with several pipeline stages, whose workers do not see what was sampled; no row of
                theirs FOLLOWS
    """

    step_id: int
    epoch: int
    slots: list[int]
    starts: list[int]
    num_tokens: list[int]
    sample: list[bool]
    new: list[NewRequest] = []
    appends: list[BlockAppend] = []
    copies: list[BlockCopy] = []
    freed_slots: list[int] = []
    num_drafts: list[int] = []
    drafts: bytes = b""
    masked: list[int] = []
    inputs: list[int] = []

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


class StepMasks(msgspec.Struct, frozen=True, tag="masks"):
    """Masks of a step's rows: for the row, and for behind each of its drafts, a bit for each token that may be sampled.

    `bits` has little-endian words of 32 bits, as many for each sample as the vocabulary takes. A row of the plan's `masked` that is
    missing here ends with an error: nothing is ever sampled without its mask.
    """

    step_id: int
    rows: list[int]
    bits: bytes


class LogprobRow(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at a position: the chosen (or given) token first, then the top k in falling order.

    `rank` is the chosen token's rank among the whole vocabulary, from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class RowExtras(msgspec.Struct, omit_defaults=True):
    """Results of a row beyond its tokens. `error` is a fault of this request alone; the other rows stand."""

    logprobs: list[LogprobRow] | None = None
    """Log probabilities of each of the sampled tokens."""
    prompt_logprobs: list[LogprobRow] | None = None
    pooled: bytes | None = None
    """The floats that a prompt became, packed (`starling_engine.token_packing`): what they are is the task's."""
    error: str | None = None
    allows_nothing: bool = False
    """True where the error is that no token was possible."""


class StepResult(msgspec.Struct, omit_defaults=True):
    """Result of plan `step_id`: columns of its rows, in the plan's order. `seconds` is the step's time on the device.

    counts     per row: its sampled tokens, 0 or one more than its accepted drafts
    tokens     the sampled tokens of one row after the other, packed (`starling_engine.token_packing`)
    unmatched  rows with OWN drafts for which the device found nothing
    extras     by row, where there are any
    compiled   kernels that were compiled, or loaded, since the result before: none should be, once a rank is ready
    eager      sizes of steps that could not be recorded, and are launched kernel by kernel
    by_library a library computed the attention of its prompts (`attention.prompts`)
    error      set, with empty columns, when the step failed as a whole
    """

    step_id: int
    epoch: int
    counts: list[int] = []
    tokens: bytes = b""
    unmatched: list[int] = []
    extras: dict[int, RowExtras] = {}
    seconds: float = 0.0
    compiled: int = 0
    eager: int = 0
    by_library: bool = False
    error: str | None = None

    def extras_of(self, row: int) -> RowExtras:
        """Returns the extras of a row, to be filled in."""
        return self.extras.setdefault(row, RowExtras())
