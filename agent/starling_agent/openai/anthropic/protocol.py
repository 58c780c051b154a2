"""POST /v1/messages and /v1/messages/count_tokens: what requests may have.

https://docs.anthropic.com/en/api/messages
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from starling_agent.openai.protocol.base import Int, RequestModel
from starling_agent.openai.protocol.refused import FieldRefusal
from starling_agent.openai.protocol.structured_outputs import FormFields

BLOCKS = {"type": "array", "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}}
CONTENT = {"anyOf": [{"type": "string"}, BLOCKS]}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": CONTENT},
    },
}
TOOLS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {"name": {"type": "string"}, "description": {"type": "string"}, "input_schema": {"type": "object"}},
    },
}
KEPT = {"type": "clear_thinking_20251015", "keep": "all"}
REFUSALS: Mapping[str, FieldRefusal] = {
    "container": FieldRefusal("there are no containers"),
    "mcp_servers": FieldRefusal("servers of tools are called by clients, not by this one", ([],)),
    "service_tier": FieldRefusal("there is one service tier", ("auto", "standard_only")),
    "context_management": FieldRefusal("the conversation is used as it is sent", ({}, {"edits": []}, {"edits": [KEPT]})),
    "speed": FieldRefusal("there is one speed", ("standard",)),
    "diagnostics": FieldRefusal("there are no diagnostics of prompts"),
    "fallbacks": FieldRefusal("there is no other model to fall back on", ([],)),
    "inference_geo": FieldRefusal("this server is where it is"),
}


class Thinking(RequestModel):
    """`budget_tokens` ends the reasoning of models whose tokenizer has tokens for its marks. All of it is shown, or nothing."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Int | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessageFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    format: MessageFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(RequestModel):
    user_id: str | None = None


class CountRequest(RequestModel):
    refusals: ClassVar[Mapping[str, FieldRefusal]] = REFUSALS

    model: str
    messages: Annotated[list[Any], WithJsonSchema(MESSAGES_SCHEMA)]
    system: Annotated[Any, WithJsonSchema(CONTENT)] | None = None
    tools: Annotated[list[Any], WithJsonSchema(TOOLS_SCHEMA)] | None = None
    tool_choice: Annotated[dict[str, Any], WithJsonSchema({"type": "object"})] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest, FormFields):
    """`metadata` and `cache_control` change nothing: prompts are cached without being asked."""

    max_tokens: Int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    speculative: bool | None = None

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"
