"""POST /v1/completions"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema
from starling_engine.errors import InvalidRequest

from starling_agent.openai.protocol import refused
from starling_agent.openai.protocol.base import Int
from starling_agent.openai.protocol.refused import FieldRefusal
from starling_agent.openai.protocol.sampling import SamplingFields

DEFAULT_MAX_TOKENS = 16
_IDS = {"type": "array", "items": {"type": "integer"}}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
    ]
}
Prompt = Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]


class CompletionRequest(SamplingFields):
    """`best_of` is accepted when it equals `n`, and then changes nothing."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.COMPLETION

    prompt: Prompt
    logprobs: Int | None = None
    best_of: Int | None = None
    max_completion_tokens: Int | None = None

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def only_echo(self) -> bool:
        """True for a request that only scores the prompt."""
        return bool(self.echo) and self.output_limit()[1] == 0 and not self.use_beam_search

    def num_prompt_logprobs(self) -> int | None:
        """Returns the number for the prompt: an echoed one has as many as the output."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    def check_best_of(self) -> None:
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("choosing the best of several outputs is not supported; leave it out", "best_of")
