"""Fields that chat and completion requests share, and their conversion to SamplingParams."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from starling_engine import RepetitionDetectionParams, SamplingParams
from starling_engine.errors import InvalidRequest

from starling_agent.openai.protocol.base import Int, RequestModel, StrOrList, shown
from starling_agent.openai.protocol.structured_outputs import StructuredOutputFields

FROM_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TokenIds = Annotated[list[Int], Field(max_length=262_144)]
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
EARLY_STOPPING_SCHEMA = {"enum": [False, "never"]}


class StreamOptions(RequestModel):
    """`include_obfuscation` is accepted only as false: nothing pads the chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, Field(description="only false: chunks are never padded")] = None


class RepetitionDetection(RequestModel):
    """Ends an output whose last `max_pattern_size` tokens, or fewer, came `min_count` times in a row."""

    max_pattern_size: Int = 0
    min_pattern_size: Int = 0
    min_count: Int = 0


class SamplingFields(StructuredOutputFields):
    """Fields for sampling and for the answer. Defaults come from the model's generation_config.json.

    `user`, `metadata`, `safety_identifier` and `prompt_cache_key` are accepted and change nothing.
    `n` is the number of beams with `use_beam_search`, and `length_penalty` the power of the length that scores are divided by.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: StrOrList | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    speculative: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[Any, WithJsonSchema(EARLY_STOPPING_SCHEMA)] | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: Int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: RequestId | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def output_limit(self) -> tuple[str, int | None]:
        """Returns the name of the field that limits the output, and its value if the request has one."""
        return "max_tokens", self.max_tokens

    def check_stream_fields(self) -> None:
        """Raises InvalidRequest for fields that contradict `stream`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise InvalidRequest("chunks are never padded", "stream_options.include_obfuscation")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs")

    def sampling(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        banned_words: list[int],
    ) -> SamplingParams:
        """Makes the engine's parameters, but the form; `defaults` are the model's. The engine's own validate() checks bounds."""
        given: dict[str, Any] = {name: defaults[name] for name in FROM_GENERATION_CONFIG if name in defaults}
        for name in _SAME_NAME:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        banned = [*(self.banned_token_ids or ()), *banned_words]
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=_bias(self.logit_bias),
            banned_token_ids=banned or None,
            repetition_detection=_detection(self.repetition_detection),
        )


_CONVERTED = (
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "banned_token_ids",
    "structured_outputs",
    "repetition_detection",
)
_SAME_NAME = [name for name in SamplingParams.__struct_fields__ if name in SamplingFields.model_fields and name not in _CONVERTED]
"""Fields that go to SamplingParams as they are."""


def _detection(wanted: RepetitionDetection | None) -> RepetitionDetectionParams | None:
    return None if wanted is None else RepetitionDetectionParams(**wanted.model_dump())


def _bias(by_name: dict[str, float] | None) -> dict[int, float] | None:
    """Converts the keys, which JSON has only as text: "42" means token 42."""
    if not by_name:
        return None
    bias = {}
    for key, value in by_name.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"keys must be token ids, got {shown(key)}", "logit_bias")
        bias[int(key)] = value
    return bias
