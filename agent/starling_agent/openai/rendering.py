"""Renders a chat's messages with the chat template."""

import json
from collections.abc import Mapping
from typing import Any

import structlog
from starling_engine.errors import InvalidRequest, QueueFull
from starling_engine.frontend.control_tokens import ChatPrompt

from starling_agent.openai.effort import COMMON
from starling_agent.openai.messages import template_messages
from starling_agent.openai.prompting import Prompting
from starling_agent.openai.protocol.chat import ChatTemplateFields
from starling_agent.openai.tools import offered_tools

log = structlog.get_logger("starling.request")
RESERVED_NAMES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "template",
    "chat_template",
    "tokenize",
)
"""Arguments of the template that requests give in other fields; of two values for one name one would be lost."""

MAX_KWARGS_BYTES = 64 << 10
"""Limit for their JSON. Variables of a template are switches and short texts; long texts belong in messages."""


async def render(
    endpoint: Prompting,
    body: ChatTemplateFields,
    messages: list[dict[str, Any]],
    request_id: str,
    tools: list[dict[str, Any]] | None = None,
) -> ChatPrompt:
    """Renders the prompt. `tools` are those that the model may call.

    Raises InvalidRequest if the template is missing or refuses the messages, QueueFull if too many wait.
    """
    body.check_template_fields()
    kwargs = body.chat_template_kwargs or {}
    if len(json.dumps(kwargs)) > MAX_KWARGS_BYTES:
        raise InvalidRequest(f"at most {MAX_KWARGS_BYTES} bytes of JSON are possible", "chat_template_kwargs")
    if body.chat_template is not None and not endpoint.settings.trust_chat_template:
        raise InvalidRequest(
            "a request's own template is a program, which would run beside the server; only --trust-request-chat-template takes it",
            "chat_template",
        )
    if body.chat_template is None and not endpoint.tokenizer.has_chat_template:
        others = "use /v1/completions, or /v1/embeddings for vectors"
        raise InvalidRequest(f"this model has no chat template; give the server one as --chat-template, or {others}", "messages")
    _check_names(endpoint, kwargs, body.chat_template)
    try:
        return await endpoint.rendering.render(
            messages=messages,
            add_generation_prompt=body.opens_answer,
            continue_final_message=bool(body.continue_final_message),
            template=body.chat_template,
            variables=_reasoning_variables(endpoint, body, kwargs) | ({} if tools is None else {"tools": tools}),
            calls=endpoint.output_format.shown_calls,
        )
    except QueueFull as error:
        log.info("refused", request_id=request_id, reason=str(error))
        raise


def _check_names(endpoint: Prompting, kwargs: Mapping[str, Any], template: str | None) -> None:
    """Raises InvalidRequest for a variable that the checkpoint's templates do not read: a typing error would pass without a word.

    Clients send switches of reasoning to every model. A request's own template is a program, which is not read in this process.
    """
    for name in kwargs:
        if name in RESERVED_NAMES:
            raise InvalidRequest(f"{name} cannot be given here", f"chat_template_kwargs.{name}")
    if template is not None and template not in endpoint.tokenizer.renderer.templates.by_name:
        return
    possible = endpoint.output_format.variables - {*RESERVED_NAMES, *endpoint.tokenizer.renderer.named_tokens}
    for name in kwargs:
        if name not in possible and name not in COMMON:
            has = ", ".join(sorted(possible)) or "none"
            raise InvalidRequest(f"the chat template reads no such variable; possible: {has}", f"chat_template_kwargs.{name[:100]}")


async def render_alone(endpoint: Prompting, body: ChatTemplateFields, messages: list[Any], request_id: str) -> ChatPrompt:
    """Renders a chat that nobody answers: all of its tools are described. Raises as `render` does."""
    tools = offered_tools(body.tools, None)
    return await render(endpoint, body, template_messages(messages), request_id, tools.functions if tools else None)


def _reasoning_variables(endpoint: Prompting, body: ChatTemplateFields, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template's variables for a level of reasoning and its budget; those that the request gives itself win.

    Raises InvalidRequest for a level that the template has no variable for.
    """
    effort, budget, known = body.reasoning_effort, body.reasoning_budget, endpoint.output_format
    found = {} if effort is None else known.effort.of(effort)
    if effort is not None and not found and (effort != "none" or known.reasoning is not None):
        raise InvalidRequest("this model's chat template has no levels of reasoning", "reasoning_effort")
    limited = {} if budget is None or effort == "none" else known.effort.of_budget(budget)
    return {**found, **limited, **kwargs}
