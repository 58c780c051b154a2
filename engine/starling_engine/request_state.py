"""What the scheduler knows of one request."""

from array import array
from enum import Enum, auto

import msgspec

from starling_engine.delta import Delta
from starling_engine.kv.manager import SequenceBlocks
from starling_engine.request import EngineRequest
from starling_engine.step import LogprobRow, RowResult


class Gate(Enum):
    """A reason why a waiting request may not start yet. One mechanism for all of them; a gate opens when its event arrives."""

    NAMES = auto()
    """Its prompt is long, and some of it is hashed before each step."""
    FORK_PARENT = auto()
    """The prompt that it shares is still being computed by its parent."""
    KV_FETCH = auto()
    """What the tiers outside have of its prompt comes to the CPU tier."""
    KV_LOAD = auto()
    """Its blocks come from the CPU tier to the device; it may be running already, and have no part in steps yet."""
    SUSPECT = auto()
    """A step that it was part of has failed: it runs only in the steps that look for the culprit, and may be running already."""


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class RequestState:
    """Counts of one request, all in tokens.

    tokens     prompt and confirmed output; int32, for many prompts may wait
    given      tokens that the workers were sent with it: of later ones each knows what its own device sampled
    planned    tokens whose computation has been submitted
    computed   tokens whose keys and values are known to be in the cache
    pending    output tokens that steps in flight will sample
    failed_at  tokens that it is to have computed before it is no suspect any more
    run        grows whenever the request leaves its slot: what an older run still has in flight is discarded
    """

    __slots__ = (
        "answered",
        "awaited",
        "budget_end",
        "cached_tokens",
        "computed",
        "entered",
        "eos_ids",
        "failed_at",
        "gates",
        "given",
        "holding",
        "last_step",
        "num_prompt",
        "pending",
        "planned",
        "put_off_run",
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

    def __init__(self, record: EngineRequest, holding: SequenceBlocks, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        params = record.params
        self.record = msgspec.structs.replace(record, prompt_ids=[], output_ids=[])
        """Without its tokens, which are held once."""
        self.holding = holding
        self.tokens = array("i", record.prompt_ids) + array("i", record.output_ids)
        self.num_prompt = len(record.prompt_ids)
        self.given = self.planned = self.computed = self.pending = self.run = self.failed_at = 0
        self.put_off_run = -1
        """The run of which the log says that it waits for blocks."""
        self.scored = record.scored
        self.status = RequestStatus.WAITING
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
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_ids = self.eos_ids | frozenset(params.stop_token_ids or ())
        self.wants_prompt_logprobs = params.prompt_logprobs is not None and record.pooling is None

    def take(self, row: RowResult, start: int) -> Delta | None:
        """What the request gains by a row of its chunk that begins at position `start`; None for nothing that is to be told."""
        if row.prompt_logprobs:
            row.prompt_logprobs = self._unscored(start, row.prompt_logprobs)
        record = self.record
        if row.error is not None or row.pooled is not None:
            reason = "stop" if row.error is None else "error"
            return Delta(record.id, record.attempt, pooled=row.pooled, error=row.error, finish_reason=reason)
        if row.tokens:
            return self._accept(row)
        return Delta(record.id, record.attempt, prompt_logprobs=row.prompt_logprobs) if row.prompt_logprobs else None

    def _accept(self, row: RowResult) -> Delta:
        """Appends the sampled tokens, up to the one that ends the request."""
        record = self.record
        delta = Delta(record.id, record.attempt, row.tokens, row.logprobs, row.prompt_logprobs)
        for taken, token in enumerate(row.tokens, 1):
            self.tokens.append(token)
            self.pending -= 1
            length = len(self.tokens)
            if token in self.stop_ids and length - self.num_prompt > record.params.min_tokens:
                delta.finish_reason = "stop"
                if token not in self.eos_ids:
                    delta.stop_token = token
            elif length >= self.budget_end:
                delta.finish_reason = "length"
            if delta.finish_reason is not None:
                delta.tokens = row.tokens[:taken]
                break
        return delta

    def _unscored(self, start: int, rows: list[LogprobRow]) -> list[LogprobRow]:
        """What of a chunk's prompt logprobs was not sent before a preemption; the chunk begins at position `start`."""
        new = rows[max(0, self.scored - start) :]
        self.scored += len(new)
        return new

    @property
    def todo(self) -> int:
        """Tokens that it has, or will have by what is in flight, and that no step computes yet."""
        return len(self.tokens) + self.pending - self.planned

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs and mean pooling need the hidden states of the whole prompt, so nothing of it may be skipped."""
        pooling = self.record.pooling
        return not self.wants_prompt_logprobs and (pooling is None or pooling.pooling == "last")

    @property
    def order(self) -> tuple[int, float]:
        """Sort key of the priority policy: lower runs earlier."""
        return (self.record.priority, self.record.arrival)
