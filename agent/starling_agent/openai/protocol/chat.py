"""POST /v1/chat/completions"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import WithJsonSchema
from starling_engine.errors import InvalidRequest

from starling_agent.openai.protocol import refused
from starling_agent.openai.protocol.base import Int, RequestModel
from starling_agent.openai.protocol.refused import FieldRefusal
from starling_agent.openai.protocol.sampling import SamplingFields

TEXT = {"type": ["string", "null"]}
PARTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["text", "input_text"]}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object"]}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [TEXT, PARTS], "description": "Only the assistant's may be left out, or null."},
            "name": TEXT,
            "tool_calls": {"type": ["array", "null"], "items": CALL, "description": "The assistant's alone."},
            "tool_call_id": TEXT,
            "reasoning": TEXT,
            "reasoning_content": TEXT,
        },
    },
}
PREDICTION_SCHEMA = {
    "type": "object",
    "required": ["type", "content"],
    "properties": {"type": {"const": "content"}, "content": {"anyOf": [{"type": "string"}, PARTS]}},
}
TOOLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
                    "description": TEXT,
                    "parameters": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
}
TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}
Messages = Annotated[list[Any], WithJsonSchema(MESSAGES_SCHEMA)]


class ChatTemplateFields(RequestModel):
    """Fields for the chat template; shared with /tokenize."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Any], WithJsonSchema(TOOLS_SCHEMA)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def opens_answer(self) -> bool:
        return self.add_generation_prompt is not False

    def check_template_fields(self) -> None:
        """Raises InvalidRequest for fields that contradict each other."""
        if self.continue_final_message and self.opens_answer:
            raise InvalidRequest(
                "the last message cannot be continued and an answer opened too; set add_generation_prompt: false",
                "continue_final_message",
            )


class ChatRequest(SamplingFields, ChatTemplateFields):
    refusals: ClassVar[Mapping[str, FieldRefusal]] = refused.CHAT

    messages: Messages
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    prediction: Annotated[dict[str, Any], WithJsonSchema(PREDICTION_SCHEMA)] | None = None

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def num_logprobs(self) -> int | None:
        """Returns the number of candidates listed at each position; None: no log probabilities."""
        if self.top_logprobs and not self.logprobs:  # gateways send 0 for none
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
