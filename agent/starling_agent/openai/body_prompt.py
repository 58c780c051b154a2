"""Reads the prompt of a request's body on any route, as the endpoint will."""

from starling_engine.frontend.prompt_encoder import PromptForm

from starling_agent.openai.anthropic import conversion as anthropic
from starling_agent.openai.anthropic.protocol import MessagesRequest
from starling_agent.openai.chat_generation import chat_prompt
from starling_agent.openai.prompting import Prompting
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.protocol.completion import CompletionRequest
from starling_agent.openai.responses import conversion as responses
from starling_agent.openai.responses.protocol import ResponsesRequest


async def body_prompt(prompting: Prompting, path: str, body: bytes, request_id: str) -> list[list[int]]:
    """Returns the token ids of the prompts of a body, of which a completion may have several.

    There are none on paths without one, and where it continues a stored response.

    Raises InvalidRequest, ApiError or QueueFull, as the route would.
    """
    match path:
        case "/v1/chat/completions":
            return [await chat_prompt(prompting, ChatRequest.parse(body).with_reasoning_fields(), request_id)]
        case "/v1/completions":
            request = CompletionRequest.parse(body)
            return await prompting.prompts.read(request.prompt, "prompt", PromptForm(request.add_special_tokens is not False))
        case "/v1/messages":
            fields, _ = anthropic.chat_fields(MessagesRequest.parse(body))
        case "/v1/responses":
            response = ResponsesRequest.parse(body)
            if response.previous_response_id is not None:
                return []
            fields, _ = responses.chat_fields(response, [])
        case _:
            return []
    return [await chat_prompt(prompting, ChatRequest.checked(prompting.output_format.without_hints(fields)), request_id)]
