"""Results of requests, as a caller gets them. Names are vLLM's."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # routers import this module, and have no numpy
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]
REPETITION_DETECTED = "repetition_detected"
"""The stop reason of an output that ended since it repeated itself."""


@dataclass(slots=True)
class Logprob:
    """Log probability of one candidate token; `rank` counts from 1, `decoded_token` is its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """An output so far, of the `n` outputs of a request.

    `token_ids`, `text` and `logprobs` are cumulative. `stop_reason` is the stop string or stop token id that ended it, or
    REPETITION_DETECTED; None for the model's own end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class DraftCount:
    """Draft tokens of all outputs of a request up to now, and how many of them were accepted."""

    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RequestOutput:
    """One generation request with its outputs so far. `prompt_logprobs[0]` is None: nothing precedes the first token.

    `queue_seconds` is that of StreamDelta, and so is `first_token_seconds`, of a beam search alone.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    drafts: DraftCount = field(default_factory=DraftCount)
    queue_seconds: float | None = None
    first_token_seconds: float | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """One pooled vector, fp32, of the model's hidden size."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0


TokenRows: TypeAlias = "npt.NDArray[np.float32]"
"""A row of numbers for each token: [T, width]."""


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Token ids, ascending, and the weight of each; all other tokens have none."""

    indices: list[int]
    values: list[float]


PooledNumbers: TypeAlias = "list[float] | TokenRows | SparseVector"
"""A vector, a row for each token, or a sparse vector."""


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of any task, fp32, in vLLM's general form."""

    data: PooledNumbers


@dataclass(slots=True)
class PoolingRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label, in the order of the checkpoint's labels; of a regression its numbers."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class ScoringOutput:
    """The score of one pair: a probability in [0, 1], a difference of logits, or a cosine in [-1, 1]."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """One pair. `prompt_token_ids` are those of a reranker's prompt, or of the two texts one behind the other."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class OutputDelta:
    """Gains of one of the `n` outputs. `text` may lag behind `token_ids` while it could be part of a stop string.

    `shown_offsets` are the offsets in `text` of the tokens that `SamplingParams.shown_token_ids` names.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    shown_offsets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StreamDelta:
    """An item of `AsyncEngine.stream`: all gains since the last item. `prompt_logprobs` comes once, with the first.

    `replayed`: these are the gains of an earlier run, and were streamed there.
    `queue_seconds`: from the coming of the first output's sequence to its first step; None where that is not known.
    `first_token_seconds`: from its tokenized prompt to its first token, where that came before this item, as in a beam search.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[OutputDelta]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    drafts: DraftCount = field(default_factory=DraftCount)
    replayed: bool = False
    queue_seconds: float | None = None
    first_token_seconds: float | None = None


@dataclass(slots=True)
class EarlierOutput:
    """Output of an earlier run, one of the `n` of its request. The reasons are those of its OutputDelta."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class EarlierRun:
    """A request's run on another engine, with which this one goes on: its `n` outputs, and the counts of its StreamDelta."""

    outputs: list[EarlierOutput]
    num_cached_tokens: int = 0
    drafts: DraftCount = field(default_factory=DraftCount)
