"""POST /v1/embeddings and /pooling"""

import array
import base64
import sys
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from starling_engine import PoolingParams
from starling_engine.errors import InvalidRequest

from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of
from starling_agent.openai.pooling import pool, prompt_form
from starling_agent.openai.protocol.answers import Embedding, NumberedAnswers, PooledData
from starling_agent.openai.protocol.embedding import EmbeddingFields, EmbeddingRequest, PoolingRequest
from starling_agent.openai.rendering import render_alone
from starling_agent.openai.request_body import body_of, body_schema

T = TypeVar("T")
Vector = list[float] | str
router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def embeddings(request: Request, body: Annotated[EmbeddingRequest, Depends(body_of(EmbeddingRequest))]) -> Response:
    """Returns one vector for each input: the pooled hidden states of the last layer."""
    return await _answer(request, body, "embd", lambda i, vector: Embedding(index=i, embedding=vector))


@router.post("/pooling", openapi_extra=body_schema(PoolingRequest))
async def pooling(request: Request, body: Annotated[PoolingRequest, Depends(body_of(PoolingRequest))]) -> Response:
    """Returns the same vectors in vLLM's form."""
    return await _answer(request, body, "pool", lambda i, vector: PooledData(index=i, data=vector))


async def _answer(request: Request, body: EmbeddingFields, kind: str, made: Callable[[int, Vector], T]) -> Response:
    """Answers with the vectors as the request wants them, each in the form that is `made` of its number and itself."""
    endpoint = endpoint_of(request)
    model = endpoint.model_name(body.model)
    body.check_source()
    field, prompts = await _prompts(endpoint, body, caller_of(request).request_id)
    params = PoolingParams(pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
    answer_id = caller_of(request).answer_id(kind, body.request_id)
    pooled = await pool(request, endpoint, {field: prompts}, params, answer_id)
    as_text = body.encoding_format == "base64"
    data = [made(i, _base64(vector) if as_text else vector) for i, vector in enumerate(pooled.vectors)]
    return json_response(NumberedAnswers(id=answer_id, created=int(time.time()), model=model, data=data, usage=pooled.usage))


async def _prompts(endpoint: Endpoint, body: EmbeddingFields, request_id: str) -> tuple[str, list[list[int]]]:
    """Returns the prompts, and the field that they are of. A chat is one prompt, rendered as if it were to be answered."""
    if body.messages is not None:
        form = prompt_form(endpoint, body, add_special_tokens=bool(body.add_special_tokens))
        chat = await render_alone(endpoint, body, body.messages, request_id)
        return "messages", [await endpoint.prompts.chat(chat, "messages", form)]
    texts = endpoint.pooled_texts
    prefix = texts.prompt(body.prompt_name)
    if body.prompt_name is not None and not _are_texts(body.input):
        raise InvalidRequest("goes before texts alone; token ids are taken as they are", "prompt_name")
    special = texts.special_tokens if body.add_special_tokens is None else body.add_special_tokens
    form = prompt_form(endpoint, body, add_special_tokens=special, prefix=prefix)
    return "input", await endpoint.prompts.read(body.input, "input", form, texts.ids)


def _are_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(item, str) for item in value))


def _base64(vector: list[float]) -> str:
    """Encodes float32, little-endian, as OpenAI's client decodes it."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
