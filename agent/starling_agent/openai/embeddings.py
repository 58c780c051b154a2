"""POST /v1/embeddings, /v2/embed and /pooling"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starling_engine import PoolingParams
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.pooled_texts import role_of
from starling_engine.frontend.pooling import check_adapter
from starling_engine.outputs import PooledNumbers

from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of
from starling_agent.openai.field_names import errors_named
from starling_agent.openai.messages import text_of_part
from starling_agent.openai.pooled_data import check_answer_size, pooled_data
from starling_agent.openai.pooling import pool, prompt_form
from starling_agent.openai.protocol.answers import EmbedAnswer, Embedding, EmbedMeta, InputTokens, NumberedAnswers
from starling_agent.openai.protocol.base import refuse_unknown, shown
from starling_agent.openai.protocol.embedding import EmbeddingFields, EmbeddingRequest, EmbedRequest, PoolingRequest
from starling_agent.openai.protocol.refused import MEDIA
from starling_agent.openai.rendering import render_alone
from starling_agent.openai.request_body import body_of, body_schema
from starling_agent.openai.vector_types import as_base64, check_types, vectors_by_type

T = TypeVar("T")
PROMPT_NAMES = {
    "search_query": ("search_query", "query", "retrieval.query"),
    "search_document": ("search_document", "document", "passage", "corpus", "retrieval.passage"),
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}
"""Cohere's types of inputs, and names of the prompts that are for them.

Sentence-transformers looks for the same ones. The last ones are those of Jina's tasks.
"""
router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def embeddings(request: Request, body: Annotated[EmbeddingRequest, Depends(body_of(EmbeddingRequest))]) -> Response:
    """Returns one vector for each input: the pooled hidden states of the last layer."""
    as_text = body.encoding_format == "base64"

    async def made(i: int, vector: PooledNumbers) -> Embedding:
        assert isinstance(vector, list), "the task gives one vector"
        return Embedding(index=i, embedding=as_base64(vector) if as_text else vector)

    return await _answer(request, body, body.params, "embd", made)


@router.post("/pooling", openapi_extra=body_schema(PoolingRequest))
async def pooling(request: Request, body: Annotated[PoolingRequest, Depends(body_of(PoolingRequest))]) -> Response:
    """Returns the same vectors in vLLM's form, or what another of its tasks makes of each input."""
    endpoint, params = endpoint_of(request), body.params
    if body.task is None:
        params = msgspec.structs.replace(params, task=endpoint.engine.model_config.pooler.task)
    classifier, labels = endpoint.engine.model_config.classifier, params.task in ("classify", "token_classify")
    activation = classifier.label_activation if classifier and labels and body.use_activation is not False else "identity"
    as_text = body.encoding_format == "base64"
    if as_text and params.task == "sparse_embed":
        raise InvalidRequest("a sparse vector has lists; possible: float", "encoding_format")
    return await _answer(request, body, params, "pool", lambda i, numbers: pooled_data(i, numbers, activation, as_text))


@router.post("/v2/embed", openapi_extra=body_schema(EmbedRequest))
async def embed(request: Request, body: Annotated[EmbedRequest, Depends(body_of(EmbedRequest))]) -> Response:
    """Returns the same vectors in Cohere's form, and in its types."""
    endpoint, source = endpoint_of(request), body.source()
    endpoint.model_name(body.model)
    texts = body.texts if body.texts is not None else _texts_of(body.inputs or [])
    types = body.embedding_types or ["float"]
    check_types(types, body.output_dimension or endpoint.engine.model_config.vector_size)
    names = {"input": source, "prompt_name": "input_type", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
    answer_id = caller_of(request).answer_id("embd", None)
    with errors_named(names):
        name, model = _prompt_name(endpoint, body.input_type), endpoint.engine.model_config
        wanted = EmbeddingRequest(
            model=body.model,
            input=texts,
            prompt_name=name,
            task=name if model.adapters is not None and name in model.adapters.names else None,
            dimensions=body.output_dimension,
            **_truncation(endpoint, body),
        )
        _, prompts = await _prompts(endpoint, wanted, caller_of(request).request_id)
        _check_longest(body, source, prompts)
        pooled = await pool(request, endpoint, {"input": prompts}, wanted.params, answer_id)
    vectors = vectors_by_type(pooled.vectors, types)
    tokens = InputTokens(pooled.usage.prompt_tokens)
    cached = pooled.usage.prompt_tokens_details.cached_tokens
    meta = EmbedMeta(billed_units=tokens, tokens=tokens, cached_tokens=cached)
    return json_response(EmbedAnswer(id=answer_id, embeddings=vectors, texts=texts, meta=meta, usage=pooled.usage))


def _texts_of(inputs: list[Any]) -> list[str]:
    """Returns the text of each of `inputs`. Raises InvalidRequest with the path of the fault."""
    texts = []
    for i, one in enumerate(inputs):
        path = f"inputs[{i}]"
        content = one.get("content") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(content, list) or len(content) != 1:
            raise InvalidRequest(f"must be an object whose content is a list of one text, got {shown(one)}", path)
        refuse_unknown(one, ("content",), path)
        texts.append(text_of_part(content[0], f"{path}.content[0]"))
    return texts


def _prompt_name(endpoint: Endpoint, kind: str | None) -> str | None:
    """Returns the name of the checkpoint's prompt for a type of inputs; None where it has none: then all are alike to it.

    Another type than Cohere's has to be such a name.
    """
    if kind == "image":
        raise InvalidRequest(MEDIA.reason, "input_type")
    known = PROMPT_NAMES.get(kind or "")
    return kind if known is None else next((name for name in known if name in endpoint.pooled_texts.names), None)


def _truncation(endpoint: Endpoint, body: EmbedRequest) -> dict[str, Any]:
    """Returns the fields of what cuts inputs. Without `truncate` ends are cut, and without `max_tokens` as little as possible."""
    if body.max_tokens is not None and body.max_tokens < 1:
        raise InvalidRequest(f"must be at least 1, got {body.max_tokens}", "max_tokens")
    if body.truncate == "NONE":
        return {}
    longest = endpoint.engine.cores.longest_request
    most = -1 if body.max_tokens is None or body.max_tokens > longest else body.max_tokens
    return {"truncate_prompt_tokens": most, "truncation_side": "left" if body.truncate == "START" else "right"}


def _check_longest(body: EmbedRequest, source: str, prompts: list[list[int]]) -> None:
    """Raises InvalidRequest for an input that would have to be cut where that is not wanted."""
    if body.truncate != "NONE" or body.max_tokens is None:
        return
    for i, prompt in enumerate(prompts):
        if len(prompt) > body.max_tokens:
            raise InvalidRequest(f"has {len(prompt)} tokens, and max_tokens is {body.max_tokens}", f"{source}[{i}]")


async def _answer(
    request: Request, body: EmbeddingFields, params: PoolingParams, kind: str, made: Callable[[int, PooledNumbers], Awaitable[T]]
) -> Response:
    """Answers with what the engine makes of each input, in the form that is `made` of its number and its numbers."""
    endpoint = endpoint_of(request)
    model = endpoint.model_name(body.model)
    body.check_source()
    check_adapter(body.adapter_name, endpoint.engine.model_config, body.adapter_field)
    endpoint.engine.validate([], params)
    of_labels = params.task in ("classify", "token_classify")
    field, prompts = await _prompts(endpoint, body, caller_of(request).request_id, of_labels=of_labels)
    answer_id = caller_of(request).answer_id(kind, body.request_id)
    late, role = endpoint.pooled_texts.late, role_of(body.prompt_name)
    asked = [late.prompt(ids, params, role) for ids in prompts]
    prompts = [ids for ids, _ in asked]
    check_answer_size(prompts, field, params, endpoint.engine.model_config, body.encoding_format == "base64")
    pooled = await pool(request, endpoint, {field: prompts}, [one for _, one in asked], answer_id)
    if params.task == "token_embed":
        each = zip(prompts, pooled.rows, strict=True)
        pooled = replace(pooled, numbers=[late.vectors(ids, rows, role) for ids, rows in each])
    data = [await made(i, numbers) for i, numbers in enumerate(pooled.numbers)]
    return json_response(NumberedAnswers(id=answer_id, created=int(time.time()), model=model, data=data, usage=pooled.usage))


async def _prompts(
    endpoint: Endpoint, body: EmbeddingFields, request_id: str, *, of_labels: bool = False
) -> tuple[str, list[list[int]]]:
    """Returns the prompts, and the field that they are of. A chat is one prompt, rendered as if it were to be answered.

    Texts that get labels are read as they are.
    """
    if body.messages is not None:
        form = prompt_form(endpoint, body, add_special_tokens=bool(body.add_special_tokens))
        chat = await render_alone(endpoint, body, body.messages, request_id)
        return "messages", [await endpoint.prompts.chat(chat, "messages", form)]
    if of_labels:
        form = prompt_form(endpoint, body, add_special_tokens=body.add_special_tokens is not False)
        return "input", await endpoint.prompts.read(body.input, "input", form)
    texts = endpoint.pooled_texts
    prefix = texts.prompt(body.prompt_name, body.adapter_name)
    if body.prompt_name is not None and not _are_texts(body.input):
        raise InvalidRequest("goes before texts alone; token ids are taken as they are", "prompt_name")
    special = texts.special_tokens if body.add_special_tokens is None else body.add_special_tokens
    form = prompt_form(endpoint, body, add_special_tokens=special, prefix=prefix)
    return "input", await endpoint.prompts.read(body.input, "input", form, texts.reader(role_of(body.prompt_name)))


def _are_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and (not value or any(isinstance(item, str) for item in value)))
