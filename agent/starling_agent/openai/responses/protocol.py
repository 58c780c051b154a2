"""POST /v1/responses: what requests may have.

https://platform.openai.com/docs/api-reference/responses
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from starling_agent.openai.protocol.base import Int, RequestModel
from starling_agent.openai.protocol.chat import Effort
from starling_agent.openai.protocol.refused import CACHE_LIFE, MEDIA, FieldRefusal
from starling_agent.openai.protocol.structured_outputs import FormFields

ITEMS_SCHEMA = {"type": "array", "items": {"type": "object"}}
INPUT_SCHEMA = {"anyOf": [{"type": "string"}, ITEMS_SCHEMA]}
REFUSALS: Mapping[str, FieldRefusal] = {
    "conversation": FieldRefusal("conversations are not stored; previous_response_id goes on from a response"),
    "prompt": FieldRefusal("there are no stored prompts"),
    "truncation": FieldRefusal("a prompt is never cut; shorten it before it is sent", ("disabled",)),
    "service_tier": FieldRefusal("there is one service tier", ("auto", "default")),
    "context_management": FieldRefusal("the conversation is used as it is sent", ([],)),
    "moderation": FieldRefusal("there is no moderation"),
    "prompt_cache_retention": CACHE_LIFE,
    "prompt_cache_options": CACHE_LIFE,
    "access_programs": FieldRefusal("there are no access programs"),
    "image": MEDIA,
    "background_options": FieldRefusal("a response in the background has no options", ({},)),
    "max_tool_calls": FieldRefusal("it limits tools that OpenAI hosts, of which there are none here"),
}


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""The first one is honoured; the others say what goes with things that no response has here."""


class ReasoningOptions(RequestModel):
    """`summary`, and its older name, are accepted: reasoning is not summarized, it comes as it is.

    `context` and `mode` have the values that say what is done: templates get the reasoning of all turns, and there is one mode.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Text(RequestModel):
    """`verbosity` changes nothing: the model has no setting for it, and Codex sends one to models of OpenAI's names."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(RequestModel):
    """`include_obfuscation` is accepted only as false: events are never padded."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(FormFields):
    """`metadata` comes back as it is; `user`, `safety_identifier`, `prompt_cache_key` and `client_metadata` change nothing."""

    refusals: ClassVar[Mapping[str, FieldRefusal]] = REFUSALS

    model: str
    input: Annotated[Any, WithJsonSchema(INPUT_SCHEMA)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Any], WithJsonSchema(ITEMS_SCHEMA)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: Text | None = None
    include: list[Include] | None = None
    metadata: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    speculative: bool | None = None
