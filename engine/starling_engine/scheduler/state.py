"""What the scheduler knows of one request."""

from enum import Enum, auto

from starling_engine.kv.manager import Holding
from starling_engine.request import EngineRequest
from starling_engine.step import LogprobRow


class Gate(Enum):
    """A reason why a waiting request may not start yet. One mechanism for all of them; a gate opens when its event arrives."""

    FORK_PARENT = auto()
    """The prompt that it shares is still being computed by its parent."""
    KV_FETCH = auto()
    """What the tiers outside have of its prompt comes to the CPU tier."""
    KV_LOAD = auto()
    """Its blocks come from the CPU tier to the device; it may be running already, and have no part in steps yet."""


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class RequestState:
    """Counts of one request, all in tokens.

    tokens     prompt and confirmed output
    planned    tokens whose computation has been submitted
    computed   tokens whose keys and values are known to be in the cache
    pending    output tokens that steps in flight will sample
    run        grows whenever the request leaves its slot: what an older run still has in flight is discarded
    """

    __slots__ = (
        "answered",
        "awaited",
        "budget_end",
        "cached_tokens",
        "computed",
        "entered",
        "faults",
        "gates",
        "holding",
        "last_step",
        "num_prompt",
        "pending",
        "planned",
        "record",
        "run",
        "scored",
        "skips_tiers",
        "slot",
        "status",
        "stop_ids",
        "tokens",
        "wants_prompt_logprobs",
    )

    def __init__(self, record: EngineRequest, holding: Holding, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        params = record.params
        self.record = record
        self.holding = holding
        self.tokens = record.prompt_ids + record.output_ids
        self.num_prompt = len(record.prompt_ids)
        self.planned = self.computed = self.pending = self.run = self.faults = 0
        self.scored = record.scored
        self.status = Status.WAITING
        self.gates: set[Gate] = set()
        self.awaited: set[int] = set()
        """Jobs of the tiers that it is parked for."""
        self.skips_tiers = False
        """Its chunks could not be had where they were said to be: it computes them."""
        self.entered = False
        """Whether the workers know of it."""
        self.slot = -1
        self.last_step = -1
        self.cached_tokens = 0
        self.answered = bool(record.output_ids)
        longest = self.num_prompt + params.max_tokens if params.max_tokens is not None else max_model_len
        self.budget_end = min(longest, max_model_len) if record.pooling is None else self.num_prompt + 1
        """The request ends when it has this many tokens; a pooled one before it has any of its own."""
        own = params.stop_token_ids or ()
        self.stop_ids = frozenset(own) if params.ignore_eos else frozenset((*eos_token_ids, *own))
        self.wants_prompt_logprobs = params.prompt_logprobs is not None and record.pooling is None

    def unscored(self, start: int, rows: list[LogprobRow]) -> list[LogprobRow]:
        """What of a chunk's prompt logprobs was not sent before a preemption; the chunk begins at position `start`."""
        new = rows[max(0, self.scored - start) :]
        self.scored += len(new)
        return new

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs and mean pooling need the hidden states of the whole prompt, so nothing of it may be skipped."""
        pooling = self.record.pooling
        return not self.wants_prompt_logprobs and (pooling is None or pooling.pooling == "last")

    @property
    def order(self) -> tuple[int, float]:
        """Sort key of the priority policy: lower runs earlier."""
        return (self.record.priority, self.record.arrival)
