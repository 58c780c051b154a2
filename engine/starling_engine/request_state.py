"""The scheduler's state of a request."""

import time
from array import array
from enum import Enum, auto

import msgspec

from starling_engine.constraint import Constraint
from starling_engine.delta import Delta
from starling_engine.kv.manager import SequenceBlocks
from starling_engine.repetition import RepetitionDetector
from starling_engine.request import EngineRequest
from starling_engine.step import LogprobRow, RowExtras


class Gate(Enum):
    """A reason why a waiting request may not start yet. A gate opens when its event arrives."""

    HASHING = auto()
    """The prompt is long, and a piece of it is hashed before each step."""
    FORK_PARENT = auto()
    """The parent still computes the prompt that the fork shares."""
    GRAMMAR = auto()
    """The grammar that the output has to follow is being built."""
    KV_PROMOTION = auto()
    """Chunks of the prompt come from secondary tiers to the CPU tier."""
    KV_LOAD = auto()
    """Blocks come from the CPU tier to the device. The request may be running already, but is in no step yet."""
    SUSPECT = auto()
    """A step of the request has failed: it runs only in steps that look for the culprit. It may be running already."""


EVENT_GATES = frozenset({Gate.FORK_PARENT, Gate.GRAMMAR, Gate.KV_PROMOTION, Gate.KV_LOAD})
"""Gates that a thread, a transfer or another request opens; planning opens the others."""


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class RequestState:
    """A request and its progress, in tokens.

    tokens     prompt and confirmed output; int32, because many prompts may wait
    given      tokens that the workers were sent; later ones each worker has from its own device
    planned    tokens whose computation has been submitted, if all drafts in flight are accepted
    computed   tokens whose keys and values are known to be in the cache
    pending    output tokens that steps in flight will sample, if all their drafts are accepted
    failed_at  tokens to compute until the request is no suspect any more
    run        grows whenever the request leaves its batch slot: results of older runs are discarded
    """

    __slots__ = (
        "answered",
        "arrived",
        "awaited",
        "blocks",
        "cached_tokens",
        "computed",
        "constraint",
        "entered",
        "eos_ids",
        "failed_at",
        "gates",
        "given",
        "length_limit",
        "num_prompt",
        "num_prompt_logprobs_sent",
        "pending",
        "planned",
        "put_off_run",
        "queue_seconds",
        "record",
        "repetition",
        "run",
        "skips_tiers",
        "slot",
        "status",
        "stop_ids",
        "tokens",
        "wants_prompt_logprobs",
    )

    def __init__(self, record: EngineRequest, blocks: SequenceBlocks, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        params = record.params
        self.record = msgspec.structs.replace(record, prompt_ids=[], output_ids=[])
        """The resume record without tokens, which `tokens` has."""
        self.blocks = blocks
        self.tokens = array("i", record.prompt_ids) + array("i", record.output_ids)
        self.num_prompt = len(record.prompt_ids)
        self.given = self.planned = self.computed = self.pending = self.run = self.failed_at = 0
        self.put_off_run = -1
        """The last run that was logged as waiting for blocks."""
        self.num_prompt_logprobs_sent = record.num_prompt_logprobs_sent
        self.status = RequestStatus.WAITING
        self.gates: set[Gate] = set()
        self.awaited: set[int] = set()
        """Transfer jobs that the request waits for."""
        self.skips_tiers = False
        """True after offloaded chunks did not come: the request computes them."""
        self.entered = False
        """True once the workers have the request in its batch slot."""
        self.arrived: float | None = time.monotonic()
        """Time of the monotonic clock; None from the first step on."""
        self.queue_seconds: float | None = None
        """Seconds until the first step; None before, and once a delta has them."""
        self.slot = -1
        """Batch slot; -1 while the request waits."""
        self.cached_tokens = 0
        self.constraint: Constraint | None = None
        """Restricts what may be sampled; None where nothing does."""
        detection = params.repetition_detection
        self.repetition: RepetitionDetector | None = None
        """Finds that the output repeats itself; None where nobody wants to know."""
        if detection is not None and detection.max_pattern_size:
            self.repetition = RepetitionDetector(detection, record.output_ids[-detection.max_pattern_size * detection.min_count :])
        self.answered = bool(record.output_ids)
        """True once output has been sent, so that prompt and cached tokens are counted once."""
        longest = self.num_prompt + params.max_tokens if params.max_tokens is not None else max_model_len
        self.length_limit = min(longest, max_model_len) if record.pooling is None else self.num_prompt + 1
        """Tokens at which the request ends; a pooled one ends before it gets any."""
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_ids = self.eos_ids | frozenset(params.stop_token_ids or ())
        self.wants_prompt_logprobs = params.prompt_logprobs is not None and record.pooling is None

    def enter(self) -> None:
        """Notes that the workers have the request now, and how long it waited if that is the first time."""
        self.entered = True
        if self.arrived is not None:
            self.queue_seconds = time.monotonic() - self.arrived
            self.arrived = None

    def apply(self, tokens: list[int], start: int, num_drafts: int, extras: RowExtras) -> Delta | None:
        """Takes the results of a row that began at `start` with `num_drafts` drafts; returns the gains, None if there are none.

        The row is known to have computed all tokens but the last one that it sampled, or, if it sampled none, its own.
        """
        record = self.record
        if extras.error is not None:
            return self.failed(extras.error, allows_nothing=extras.allows_nothing)
        if extras.pooled is not None:
            return Delta(record.id, record.attempt, pooled=extras.pooled, finish_reason="stop")
        scores = self._unscored(start, extras.prompt_logprobs) if extras.prompt_logprobs else None
        if tokens:
            self.pending -= 1 + num_drafts
            if num_drafts:
                self.planned -= 1 + num_drafts - len(tokens)  # drafts that were refused
            return self._accept(Delta(record.id, record.attempt, tokens, extras.logprobs, scores))
        return Delta(record.id, record.attempt, prompt_logprobs=scores) if scores else None

    def failed(self, error: str, *, allows_nothing: bool = False) -> Delta:
        """Returns the delta of a request that ends with an error. It names a field where what the caller asks for is at fault.

        `allows_nothing` is `RowExtras.allows_nothing`.
        """
        record, param = self.record, None
        if self.constraint is not None and self.constraint.error is not None:
            error, param = self.constraint.error, record.grammar_field
        elif allows_nothing and len(fields := self._forbidding_fields()) > 1:
            param, *others = fields
            error = f"with {' and '.join(others)} it leaves no token that is possible"
            if (length := len(self.tokens) - self.num_prompt) > 0:
                error += f" behind {length} of output"
        return Delta(record.id, record.attempt, error=error, error_param=param, finish_reason="error")

    def _forbidding_fields(self) -> list[str]:
        """Returns the request's fields that forbid tokens."""
        record, params = self.record, self.record.params
        wanted = {
            record.grammar_field or "structured_outputs": record.grammar,
            "thinking_token_budget": record.reasoning_limit,
            "allowed_token_ids": params.allowed_token_ids,
            "banned_token_ids": params.banned_token_ids,
            "min_tokens": params.min_tokens,
        }
        return [field for field, value in wanted.items() if value]

    def _accept(self, delta: Delta) -> Delta:
        """Appends the delta's tokens, and cuts it behind the one that ends the request."""
        for taken, token in enumerate(delta.tokens, 1):
            self.tokens.append(token)
            self._check_end(delta, token)
            if delta.finish_reason is not None:
                delta.tokens = delta.tokens[:taken]
                delta.logprobs = delta.logprobs[:taken] if delta.logprobs is not None else None
                break
        return delta

    def _check_end(self, delta: Delta, token: int) -> None:
        """Sets the delta's finish reason if `token`, which is the last one now, ends the request."""
        length = len(self.tokens)
        min_length = self.num_prompt + self.record.params.min_tokens
        repeats = self.repetition is not None and self.repetition.advance(token)
        if token in self.stop_ids and length > min_length:
            delta.finish_reason = "stop"
            if token not in self.eos_ids:
                delta.stop_token = token
        elif self.constraint is not None and self._follow(self.constraint, token):
            delta.finish_reason = "stop"
            delta.last_is_text = token not in self.stop_ids
        elif length >= self.length_limit:
            delta.finish_reason = "length"
        elif repeats and length >= min_length:
            delta.finish_reason = "repetition"

    def _follow(self, constraint: Constraint, token: int) -> bool:
        """Moves the constraint behind a token; returns whether the output ends there."""
        constraint.advance(token)
        return constraint.is_finished

    def _unscored(self, start: int, rows: list[LogprobRow]) -> list[LogprobRow]:
        """Returns the prompt logprobs that were not sent before a preemption, of a row that begins at position `start`."""
        new = rows[max(0, self.num_prompt_logprobs_sent - start) :]
        self.num_prompt_logprobs_sent += len(new)
        return new

    @property
    def todo(self) -> int:
        """Tokens, including those that steps in flight will sample, that no step computes yet."""
        return len(self.tokens) + self.pending - self.planned

    @property
    def reads_prefix_cache(self) -> bool:
        """False for prompt logprobs and most pooling: they need the hidden states of the whole prompt."""
        pooling = self.record.pooling
        return not self.wants_prompt_logprobs and (pooling is None or pooling.reads_prefix_cache)

    @property
    def order(self) -> tuple[int, float]:
        """Sort key of the priority policy: lower runs earlier."""
        return (self.record.priority, self.record.arrival)
