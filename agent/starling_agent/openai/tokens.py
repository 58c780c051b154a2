"""POST /tokenize and /detokenize, GET /tokenizer_info"""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starling_engine.errors import InvalidRequest

from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of
from starling_agent.openai.protocol.answers import DetokenizedText, Tokens
from starling_agent.openai.protocol.tokens import DetokenizeRequest, TokenizeRequest
from starling_agent.openai.rendering import render_alone
from starling_agent.openai.request_body import body_of, body_schema

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request, body: Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))]) -> Response:
    """Returns token ids of a text, or of a chat as the model would see it."""
    endpoint = endpoint_of(request)
    endpoint.model_name(body.model)
    body.check_source()
    ids = await _ids(endpoint, body, caller_of(request).request_id)
    strings = [endpoint.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return json_response(Tokens(len(ids), endpoint.max_model_len, ids, strings))


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request, body: Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))]) -> Response:
    """Returns the text of token ids, with special tokens."""
    endpoint = endpoint_of(request)
    endpoint.model_name(body.model)
    for i, token in enumerate(body.tokens):
        if not 0 <= token < endpoint.vocab_size:
            raise InvalidRequest(f"token id {token} is not in the vocabulary of {endpoint.vocab_size} tokens", f"tokens[{i}]")
    return json_response(DetokenizedText(endpoint.tokenizer.decode(body.tokens, skip_special_tokens=False)))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Returns the checkpoint's tokenizer_config.json in vLLM's form."""
    return JSONResponse(endpoint_of(request).tokenizer.info)


async def _ids(endpoint: Endpoint, body: TokenizeRequest, request_id: str) -> list[int]:
    if body.messages is None:
        text = body.prompt or ""
        return await endpoint.prompts.encode(text, "prompt", body.add_special_tokens is not False)
    prompt = await render_alone(endpoint, body, body.messages, request_id)
    return await endpoint.prompts.encode(prompt, "messages", bool(body.add_special_tokens))
