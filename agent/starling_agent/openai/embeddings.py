"""POST /v1/embeddings"""

import array
import asyncio
import base64
import sys
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from starling_engine import PoolingParams
from starling_engine.frontend.gathering import gather_or_cancel

from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of, unique_id
from starling_agent.openai.protocol.answers import Embedding, Embeddings, make_usage
from starling_agent.openai.protocol.embedding import EmbeddingRequest
from starling_agent.openai.request_body import body_of, body_schema

router = APIRouter(tags=["OpenAI"])

OPEN_INPUTS = 64
"""Inputs of one request in the engine at once. A long list neither fills the queue nor is refused for its length."""


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def embeddings(request: Request, body: Annotated[EmbeddingRequest, Depends(body_of(EmbeddingRequest))]) -> Response:
    """Returns one vector for each input: the pooled hidden states of the last layer."""
    endpoint = endpoint_of(request)
    model = endpoint.model_name(body.model)
    prompts = await endpoint.prompts.read(body.input, "input", body.add_special_tokens is not False)
    params = PoolingParams(pooling=body.pooling or "mean", normalize=body.normalize is not False)
    caller = caller_of(request)
    answer_id = f"embd-{unique_id(body.request_id or caller.request_id)}"
    salt = caller.cache_salt(None)
    vectors = await endpoint.open_requests.run(request.receive, _embed_all(endpoint, prompts, params, answer_id, salt))
    as_text = body.encoding_format == "base64"
    return json_response(
        Embeddings(
            id=answer_id,
            created=int(time.time()),
            model=model,
            data=[Embedding(index=i, embedding=_base64(v) if as_text else v) for i, v in enumerate(vectors)],
            usage=make_usage(sum(map(len, prompts)), 0, 0),
        )
    )


async def _embed_all(
    endpoint: Endpoint, prompts: list[list[int]], params: PoolingParams, answer_id: str, salt: str | None
) -> list[list[float]]:
    """Returns all vectors in order; the first failure cancels the others."""
    semaphore = asyncio.Semaphore(OPEN_INPUTS)
    return await gather_or_cancel(
        _embed(endpoint, semaphore, ids, params, f"{answer_id}-{i}", salt) for i, ids in enumerate(prompts)
    )


async def _embed(
    endpoint: Endpoint, semaphore: asyncio.Semaphore, ids: list[int], params: PoolingParams, engine_id: str, salt: str | None
) -> list[float]:
    async with semaphore:
        with endpoint.metrics.pooling(len(ids)):
            output = await endpoint.engine.embed(ids, params, request_id=engine_id, cache_salt=salt)
    return output.outputs.embedding


def _base64(vector: list[float]) -> str:
    """Encodes float32, little-endian, as OpenAI's client decodes it."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")
