"""Answers of routes that do not stream, written by msgspec. Routers read `usage`: it is the last field."""

from typing import Generic, Literal, TypeVar

import msgspec
from starling_engine.outputs import DraftCount, FinishReason

T = TypeVar("T")


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """`completion_tokens_details` is there for a request with a prediction, and for outputs that are read for reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def make_usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, drafts: DraftCount | None = None, reasoning: int | None = None
) -> Usage:
    usage = Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens))
    if drafts is not None or reasoning is not None:
        accepted, rejected = (drafts.accepted, drafts.proposed - drafts.accepted) if drafts is not None else (0, 0)
        usage.completion_tokens_details = CompletionTokensDetails(accepted, rejected, reasoning or 0)
    return usage


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class CustomCall(msgspec.Struct):
    name: str
    input: str


class ChatCustomToolCall(msgspec.Struct):
    id: str
    custom: CustomCall
    type: Literal["custom"] = "custom"


class ChatMessage(msgspec.Struct):
    """An answer. `reasoning` and `reasoning_content` are two names for one text, of which each client knows its own."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChatToolCall | ChatCustomToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One choice; `token_ids` only if the request wants them."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage


class NumberedAnswers(msgspec.Struct, Generic[T], kw_only=True):
    """Answers to several inputs, each with its number."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[T]
    usage: Usage


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class SparseData(msgspec.Struct):
    """Token ids, and the weight of each."""

    indices: list[int]
    values: list[float]


class PooledData(msgspec.Struct, kw_only=True):
    """Numbers of an input; `shape` says how those in base64 lie, where each token has some."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str | msgspec.Raw | SparseData
    shape: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET


class VectorsByType(msgspec.Struct, omit_defaults=True, rename={"float_": "float"}):
    """The vectors of all inputs, in each type that was asked for."""

    float_: list[list[float]] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class ApiVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class InputTokens(msgspec.Struct):
    input_tokens: int


class EmbedMeta(msgspec.Struct, kw_only=True):
    """The usage in Cohere's form, which the answer has in OpenAI's, too."""

    api_version: ApiVersion = ApiVersion()
    billed_units: InputTokens
    tokens: InputTokens
    cached_tokens: int


class EmbedAnswer(msgspec.Struct, kw_only=True):
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    id: str
    embeddings: VectorsByType
    texts: list[str]
    meta: EmbedMeta
    usage: Usage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class RankedDocument(msgspec.Struct):
    text: str


class RankedResult(msgspec.Struct, omit_defaults=True):
    """A document's place in the request, and its score; its text unless the request wants none."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(msgspec.Struct, kw_only=True):
    """Documents, the best one first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: Usage


class ModelArchitecture(msgspec.Struct, kw_only=True, frozen=True):
    """Modalities as OpenRouter's clients read them."""

    modality: str = "text->text"
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[str, ...] = ("text",)


class ModelCard(msgspec.Struct, kw_only=True):
    """A served name. Clients of vLLM read `max_model_len`, those of OpenRouter `context_length` and `architecture`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    root: str
    max_model_len: int
    context_length: int
    architecture: ModelArchitecture = ModelArchitecture()
    owned_by: str = "starling"
    parent: None = None


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct):
    prompt: str
