"""Makes the generation of a chat: its prompt, the tools that it may call, and how its outputs are read."""

from dataclasses import replace

from starling_engine.errors import InvalidRequest

from starling_agent.openai.endpoint import Caller, Endpoint
from starling_agent.openai.generation import Generation
from starling_agent.openai.make_generation import make_generation
from starling_agent.openai.messages import assistant_text, predicted_text, template_messages
from starling_agent.openai.output_format import OutputReading
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.protocol.structured_outputs import Form
from starling_agent.openai.rendering import render
from starling_agent.openai.tools import OfferedTools, calls_form, offered_tools


async def chat_generation(
    endpoint: Endpoint, body: ChatRequest, caller: Caller, *, kind: str = "chatcmpl", clamps: bool = False
) -> Generation:
    """Makes the generation of a chat. `kind` begins the answer's id; `clamps` lets the context's end limit the output.

    Raises InvalidRequest, and what rendering raises.
    """
    endpoint.model_name(body.model)
    body.check_stream_fields()
    messages = template_messages(body.messages)
    tools = _callable_tools(endpoint, body)
    calls = _calls_form(endpoint, body, tools)
    prompt = await render(endpoint, body, messages, caller.request_id, tools.functions if tools else None)
    ids = await endpoint.prompts.text(prompt, "messages", bool(body.add_special_tokens))
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
        clamps=clamps,
        logprobs=body.num_logprobs(),
        prompt_logprobs=body.prompt_logprobs,
        reading=_reading(endpoint, body, tools, calls or body.form(), ids),
        calls=calls,
        renamed={"logprobs": "top_logprobs", "prompt": "messages"},
    )


async def chat_prompt(endpoint: Endpoint, body: ChatRequest, request_id: str) -> list[int]:
    """Returns the token ids of a chat's prompt, which may be longer than the context. Raises as `chat_generation` does."""
    endpoint.model_name(body.model)
    tools = _callable_tools(endpoint, body)
    prompt = await render(endpoint, body, template_messages(body.messages), request_id, tools.functions if tools else None)
    return await endpoint.prompts.encode(prompt, "messages", bool(body.add_special_tokens))


def _callable_tools(endpoint: Endpoint, body: ChatRequest) -> OfferedTools | None:
    """Returns the tools that the model may call. Raises InvalidRequest where it has no known way to do so."""
    tools = offered_tools(body.tools, body.tool_choice)
    if tools is None:
        return None
    if endpoint.output_format.calls is None:
        why = "the format in which this model calls tools is not known; the server takes its name as --tool-call-parser"
        raise InvalidRequest(why, "tools")
    return tools


def _calls_form(endpoint: Endpoint, body: ChatRequest, tools: OfferedTools | None) -> Form | None:
    """Returns the form that calls have to have, if there is one. Raises InvalidRequest where it cannot be enforced."""
    format_of_calls = endpoint.output_format.calls
    if tools is None or format_of_calls is None:
        return None
    parallel, may_reason = body.parallel_tool_calls is not False, endpoint.output_format.marks_reasoning
    return calls_form(tools, format_of_calls, parallel=parallel, may_reason=may_reason)


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
    return replace(reading, parallel=body.parallel_tool_calls is not False, shows_reasoning=body.include_reasoning is not False)
