"""A chat's messages as the text that the model was trained on."""

import json
from typing import Any

import structlog
from starling_engine.errors import InvalidRequest, QueueFull
from starling_engine.frontend.control_tokens import ChatPrompt

from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.protocol.chat import ChatTemplateFields

log = structlog.get_logger("starling.request")
OWN_NAMES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "template",
    "chat_template",
    "tokenize",
)
"""Arguments of the template that have fields of their own; two values for one name would hide one of them."""

LARGEST_KWARGS = 64 << 10
"""Bytes, as JSON. Variables of a template are switches and short texts; what is long belongs in messages."""


async def render(endpoint: Endpoint, body: ChatTemplateFields, messages: list[dict[str, Any]], request_id: str) -> ChatPrompt:
    """Raises InvalidRequest when the template refuses the messages, or there is none; QueueFull when too many chats wait."""
    body.check_template_fields()
    kwargs = body.chat_template_kwargs or {}
    for name in OWN_NAMES:
        if name in kwargs:
            raise InvalidRequest(f"{name} cannot be given here", f"chat_template_kwargs.{name}")
    if len(json.dumps(kwargs)) > LARGEST_KWARGS:
        raise InvalidRequest(f"at most {LARGEST_KWARGS} bytes of JSON are possible", "chat_template_kwargs")
    if body.chat_template is not None and not endpoint.settings.trust_chat_template:
        raise InvalidRequest(
            "a request's own template is a program, which would run beside the server; only --trust-request-chat-template takes it",
            "chat_template",
        )
    if body.chat_template is None and not endpoint.engine.tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
    try:
        return await endpoint.rendering.render(
            messages=messages,
            add_generation_prompt=body.opens_answer,
            continue_final_message=bool(body.continue_final_message),
            template=body.chat_template,
            variables=kwargs,
        )
    except QueueFull as error:
        log.info("refused", request_id=request_id, reason=str(error))
        raise
