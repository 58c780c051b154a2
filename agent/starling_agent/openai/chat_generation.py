"""Makes the generation of a chat: its prompt, the tools that it may call, and how its outputs are read."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from starling_engine.errors import InvalidRequest, PromptTooLong
from starling_engine.frontend.pooling import check_gives_tokens
from starling_engine.frontend.prompt_encoder import PromptForm

from starling_agent.openai.endpoint import Caller, Endpoint
from starling_agent.openai.generation import Generation
from starling_agent.openai.make_generation import make_generation
from starling_agent.openai.messages import assistant_text, predicted_text, template_messages
from starling_agent.openai.output_format import OutputReading
from starling_agent.openai.prompting import Prompting
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.protocol.structured_outputs import Form
from starling_agent.openai.rendering import render
from starling_agent.openai.tools import OfferedTools, calls_form, offered_tools, with_enforced_grammars


async def chat_generation(
    endpoint: Endpoint, body: ChatRequest, caller: Caller, *, kind: str = "chatcmpl", lenient: bool = False
) -> Generation:
    """Makes the generation of a chat. `kind` begins the answer's id.

    `lenient` takes what clients of an API send to every model: limits that the context has no room for, and grammars of
    tools that cannot be enforced. The model is shown these all the same.
    Raises InvalidRequest, and what rendering raises.
    """
    endpoint.model_name(body.model)
    check_gives_tokens(endpoint.engine.model_config)  # before a template is asked for, which such a model need not have
    body.check_stream_fields()
    messages = template_messages(body.messages)
    tools = _callable_tools(endpoint, body, lenient=lenient)
    form = _form(endpoint, body, tools)
    with _longest_part_named(body):
        prompt = await render(endpoint, body, messages, caller.request_id, tools.functions if tools else None)
        ids = await endpoint.prompts.chat(prompt, "messages", PromptForm(bool(body.add_special_tokens)))
    prediction = predicted_text(body.prediction)
    return await make_generation(
        endpoint,
        body,
        kind=kind,
        caller=caller,
        prompts=[ids],
        prediction=None if prediction is None else await endpoint.prompts.encode(prediction, "prediction", False),
        prefixes=[assistant_text(messages[-1]) if body.echo else ""],
        default_max_tokens=None,
        clamps=lenient,
        logprobs=body.num_logprobs(),
        prompt_logprobs=body.prompt_logprobs,
        reading=_reading(endpoint, body, tools, form, ids),
        form=form,
        renamed={"logprobs": "top_logprobs", "prompt": "messages"},
    )


async def chat_prompt(endpoint: Prompting, body: ChatRequest, request_id: str) -> list[int]:
    """Returns the token ids of a chat's prompt, which may be longer than the context. Raises as `chat_generation` does."""
    endpoint.model_name(body.model)
    tools = _callable_tools(endpoint, body, lenient=True)  # grammars leave the prompt as it is
    prompt = await render(endpoint, body, template_messages(body.messages), request_id, tools.functions if tools else None)
    return await endpoint.prompts.encode(prompt, "messages", bool(body.add_special_tokens))


@contextmanager
def _longest_part_named(body: ChatRequest) -> Iterator[None]:
    """Names what takes most of a prompt that does not fit: the messages or the tools."""
    try:
        yield
    except PromptTooLong as error:
        longest = "tools" if len(repr(body.tools or "")) > len(repr(body.messages)) else "messages"
        raise PromptTooLong(error.message, longest) from None


def _callable_tools(endpoint: Prompting, body: ChatRequest, *, lenient: bool) -> OfferedTools | None:
    """Returns the tools that the model may call. Raises InvalidRequest where it has no known way to do so.

    `lenient` is as `chat_generation` has it.
    """
    tools = offered_tools(body.tools, body.tool_choice)
    if tools is None:
        return None
    family = endpoint.output_format.calls
    if family is None:
        why = "the format in which this model calls tools is not known; the server takes its name as --tool-call-parser"
        raise InvalidRequest(why, "tools")
    return with_enforced_grammars(tools, family, has_form=body.form() is not None) if lenient else tools


def _form(endpoint: Endpoint, body: ChatRequest, tools: OfferedTools | None) -> Form | None:
    """Returns the form that outputs have to have, if there is one: the request's own, or that of calls.

    Where the request does not say, a model that marks its reasoning may reason first: the answer's content has none of it.
    Raises InvalidRequest for two forms, and for one that cannot follow the message that is to go on.
    """
    own, known = body.form(), endpoint.output_format
    calls = None
    if tools is not None and known.calls is not None:
        calls = calls_form(tools, known.calls, parallel=body.parallel_tool_calls is not False)
    if own is not None and calls is not None:
        raise InvalidRequest(f"{own.field} and tools each say which form the output has; give one of them", own.field)
    form = own or calls
    goes_on = bool(body.continue_final_message) and known.writes_headers
    if form is not None and goes_on and (form is calls or form.may_reason):
        why = "the last message goes on in the part that it has begun, and this model writes others for reasoning and calls"
        raise InvalidRequest(why, "tool_choice" if form is calls else "structured_outputs.reasoning")
    if form is None or form.may_reason is not None:
        return form
    return dataclasses.replace(form, may_reason=known.reasons_before(form) and body.reasoning_effort != "none" and not goes_on)


def _reading(
    endpoint: Endpoint, body: ChatRequest, tools: OfferedTools | None, form: Form | None, prompt: list[int]
) -> OutputReading | None:
    """Returns how the outputs are read. An output that has to have a form is content, unless it may reason first."""
    if body.use_beam_search:
        return None
    reasons = None if form is None or form.may_reason else False
    if body.continue_final_message and endpoint.output_format.writes_headers:
        reasons = False
    reading = endpoint.output_format.reading(None if tools is None else tools.schemas, prompt, reasons=reasons)
    if reading is None:
        return None
    return dataclasses.replace(
        reading,
        parallel=body.parallel_tool_calls is not False,
        custom=frozenset() if tools is None else tools.custom,
        shows_reasoning=body.include_reasoning is not False,
    )
