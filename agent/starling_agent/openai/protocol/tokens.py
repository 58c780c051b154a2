"""POST /tokenize and /detokenize (vLLM's routes)"""

from collections.abc import Mapping
from typing import ClassVar

from starling_engine.errors import InvalidRequest

from starling_agent.openai.protocol import refused
from starling_agent.openai.protocol.base import RequestModel
from starling_agent.openai.protocol.chat import ChatTemplateFields, Messages
from starling_agent.openai.protocol.refused import FieldRefusal
from starling_agent.openai.protocol.sampling import TokenIds


class TokenizeRequest(ChatTemplateFields):
    """A request with either `prompt` or `messages`."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check_source(self) -> None:
        """Raises InvalidRequest unless there is one of both, with fields that it has a use for."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if self.messages is None:
            self.refuse_template_fields()


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: TokenIds
