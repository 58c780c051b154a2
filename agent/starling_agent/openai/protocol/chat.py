"""POST /v1/chat/completions"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import WithJsonSchema
from starling_engine.errors import InvalidRequest

from starling_agent.openai.field_names import OwnName
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
FUNCTION_CALL = {
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
CUSTOM_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "custom"},
        "custom": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "input": {"type": "string"}},
            "required": ["name", "input"],
        },
    },
    "required": ["type", "custom"],
}
CALL = {"anyOf": [FUNCTION_CALL, CUSTOM_CALL]}
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
TOOL_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"}
FUNCTION_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": TOOL_NAME,
                "description": TEXT,
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
TEXT_FORMAT = {"type": ["object", "null"], "properties": {"type": {"const": "text"}}, "required": ["type"]}
GRAMMAR_FORMAT = {
    "type": "object",
    "required": ["type", "grammar"],
    "properties": {
        "type": {"const": "grammar"},
        "grammar": {
            "type": "object",
            "required": ["syntax", "definition"],
            "properties": {"syntax": {"enum": ["lark", "regex"]}, "definition": {"type": "string"}},
        },
    },
}
CUSTOM_TOOL = {
    "type": "object",
    "required": ["type", "custom"],
    "properties": {
        "type": {"const": "custom"},
        "custom": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": TOOL_NAME, "description": TEXT, "format": {"anyOf": [TEXT_FORMAT, GRAMMAR_FORMAT]}},
        },
    },
}
TOOLS_SCHEMA = {"type": "array", "items": {"anyOf": [FUNCTION_TOOL, CUSTOM_TOOL]}}


def _chosen_tool(kind: str) -> dict[str, Any]:
    named = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return {"type": "object", "required": ["type", kind], "properties": {"type": {"const": kind}, kind: named}}


CHOSEN_TOOL = {"anyOf": [_chosen_tool("function"), _chosen_tool("custom")]}
ALLOWED_TOOLS = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["mode", "tools"],
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "minItems": 1, "items": CHOSEN_TOOL}},
        },
    },
}
TOOL_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required"]}, CHOSEN_TOOL, ALLOWED_TOOLS]}
Messages = Annotated[list[Any], WithJsonSchema(MESSAGES_SCHEMA)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningObject(RequestModel):
    """OpenRouter's object for what fields of their own say, too. `summary` changes nothing: reasoning comes as it is."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Int | None = None
    exclude: bool | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None

    def check(self) -> None:
        """Raises InvalidRequest where `enabled` says another thing than the rest."""
        reasons = (self.effort is not None and self.effort != "none") or self.max_tokens is not None
        if (self.enabled is False and reasons) or (self.enabled and self.effort == "none"):
            raise InvalidRequest("effort or max_tokens says the contrary; give one of them", "reasoning.enabled")

    def fields(self) -> dict[str, tuple[str, Any]]:
        """Returns the fields that say the same, each with the name that it has here, and its value."""
        switch = {None: None, True: "medium", False: "none"}[self.enabled]
        found: dict[str, tuple[str, Any]] = {
            "reasoning_effort": ("enabled", "none") if switch == "none" else ("effort", self.effort or switch),
            "thinking_token_budget": ("max_tokens", self.max_tokens),
            "include_reasoning": ("exclude", None if self.exclude is None else not self.exclude),
        }
        return {field: (name, value) for field, (name, value) in found.items() if value is not None}


class ChatTemplateFields(RequestModel):
    """Fields for the chat template; shared with /tokenize."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Any], WithJsonSchema(TOOLS_SCHEMA)] | None = None
    reasoning_effort: Effort | None = None

    @property
    def opens_answer(self) -> bool:
        return self.add_generation_prompt is not False

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens of reasoning that the request allows; None: it does not say, or has no field for them."""
        return None

    def refuse_template_fields(self) -> None:
        """Raises InvalidRequest for a field that says how messages are rendered, where there are none."""
        for name in ChatTemplateFields.model_fields:
            if getattr(self, name) is not None:
                raise InvalidRequest("is for messages alone", name)

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
    reasoning: ReasoningObject | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    prediction: Annotated[dict[str, Any], WithJsonSchema(PREDICTION_SCHEMA)] | None = None

    def with_reasoning_fields(self) -> Self:
        """Returns the request with what `reasoning` says in the fields that say the same. Raises InvalidRequest for one in both."""
        if self.reasoning is not None:
            self.reasoning.check()
        given = self._in_reasoning()
        for field, (name, _) in given.items():
            if getattr(self, field) is not None:
                raise InvalidRequest(f"{field} says so too; give one of them", f"reasoning.{name}")
        return self.model_copy(update={"reasoning": None, **{field: value for field, (_, value) in given.items()}})

    @property
    def names_in_reasoning(self) -> list[OwnName]:
        """The names of fields that `reasoning` has, for `fields_named`."""
        return [OwnName(f"^{field}$", f"reasoning.{name}") for field, (name, _) in self._in_reasoning().items()]

    def _in_reasoning(self) -> dict[str, tuple[str, Any]]:
        return {} if self.reasoning is None else self.reasoning.fields()

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def reasoning_budget(self) -> int | None:
        return self.thinking_token_budget

    def num_logprobs(self) -> int | None:
        """Returns the number of candidates listed at each position; None: no log probabilities."""
        if self.top_logprobs and not self.logprobs:  # gateways send 0 for none
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
