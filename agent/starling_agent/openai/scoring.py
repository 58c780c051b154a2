"""POST /score, /rerank and /classify

A reranker that is a language model scores a pair by the logits of its answers, a model with a head by its one label.
All other models score by the cosine of two vectors.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from starling_engine import PoolingParams
from starling_engine.errors import InvalidRequest
from starling_engine.frontend.pairs import PairPrompt, PairScorer, Side, check_compared, check_judged, check_sides, similarities
from starling_engine.model_config.classifier import activated
from starling_engine.model_config.multi_vector import ROLES

from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of
from starling_agent.openai.pooled_data import check_answer_size
from starling_agent.openai.pooling import pool, prompt_form, truncation_of
from starling_agent.openai.protocol.answers import (
    Classification,
    NumberedAnswers,
    RankedDocument,
    RankedResult,
    Ranking,
    Score,
    Usage,
)
from starling_agent.openai.protocol.scoring import ClassifyRequest, RerankRequest, ScoreRequest, ScoringRequest
from starling_agent.openai.request_body import body_of, body_schema

router = APIRouter(tags=["scores"])


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """The score of each pair, and the tokens of all prompts that they took."""

    scores: Sequence[float]
    usage: Usage


@router.post("/score", openapi_extra=body_schema(ScoreRequest))
@router.post("/v1/score", openapi_extra=body_schema(ScoreRequest))
async def score(request: Request, body: Annotated[ScoreRequest, Depends(body_of(ScoreRequest))]) -> Response:
    """Returns the score of each pair of texts."""
    model = endpoint_of(request).model_name(body.model)
    first, second = (Side(name, texts, is_list) for name, texts, is_list in body.sides())
    answer_id = caller_of(request).answer_id("score", body.request_id)
    scored = await _score(request, body, first, second, answer_id)
    data = [Score(index=i, score=score) for i, score in enumerate(scored.scores)]
    return json_response(NumberedAnswers(id=answer_id, created=int(time.time()), model=model, data=data, usage=scored.usage))


@router.post("/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/v1/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/v2/rerank", openapi_extra=body_schema(RerankRequest))
async def rerank(request: Request, body: Annotated[RerankRequest, Depends(body_of(RerankRequest))]) -> Response:
    """Returns the documents by their scores with the query, the best one first."""
    model = endpoint_of(request).model_name(body.model)
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequest(f"must be at least 1, got {body.top_n}; leave it out for all documents", "top_n")
    texts, answer_id = body.texts(), caller_of(request).answer_id("rerank", body.request_id)
    scored = await _score(request, body, Side("query", [body.query], is_list=False), Side("documents", texts), answer_id)
    best = sorted(range(len(texts)), key=lambda i: -scored.scores[i])[: body.top_n]
    shown = body.return_documents is not False
    results = [RankedResult(i, scored.scores[i], RankedDocument(texts[i]) if shown else None) for i in best]
    return json_response(Ranking(id=answer_id, model=model, results=results, usage=scored.usage))


@router.post("/classify", openapi_extra=body_schema(ClassifyRequest))
async def classify(request: Request, body: Annotated[ClassifyRequest, Depends(body_of(ClassifyRequest))]) -> Response:
    """Returns the probability of each label for each input."""
    endpoint = endpoint_of(request)
    model, params = endpoint.model_name(body.model), PoolingParams(task="classify")
    endpoint.engine.validate([], params)
    classifier = endpoint.engine.model_config.classifier
    assert classifier is not None, "checked with the parameters"
    answer_id = caller_of(request).answer_id("classify", body.request_id)
    form = prompt_form(endpoint, body, add_special_tokens=body.add_special_tokens is not False)
    prompts = await endpoint.prompts.read(body.input, "input", form)
    pooled = await pool(request, endpoint, {"input": prompts}, params, answer_id)
    activation = "identity" if body.use_activation is False else classifier.label_activation
    data = [_classification(i, classifier.labels, activated(activation, vector)) for i, vector in enumerate(pooled.vectors)]
    return json_response(NumberedAnswers(id=answer_id, created=int(time.time()), model=model, data=data, usage=pooled.usage))


def _classification(index: int, labels: Sequence[str], probs: list[float]) -> Classification:
    return Classification(index=index, label=labels[probs.index(max(probs))], probs=probs, num_classes=len(probs))


async def _score(request: Request, body: ScoringRequest, first: Side, second: Side, answer_id: str) -> ScoredPairs:
    """Scores each text of the second side with its one of the first. Raises InvalidRequest naming the field at fault."""
    endpoint = endpoint_of(request)
    most = endpoint.settings.max_prompts
    for side in (first, second):
        if not 1 <= len(side.texts) <= most:
            raise InvalidRequest(f"1 to {most} texts are possible in one request, got {len(side.texts)}", side.field)
    check_sides(first, second)
    first = await _shortened(endpoint, first, body.max_tokens_per_query, "max_tokens_per_query")
    second = await _shortened(endpoint, second, body.max_tokens_per_doc, "max_tokens_per_doc")
    if endpoint.pair_scorer is not None:
        check_judged(body.task, "task")
        return await _judge(request, endpoint.pair_scorer, body, first, second, answer_id)
    check_compared(body.instruction, body.use_activation)
    task = body.task or endpoint.engine.model_config.pooler.task
    if task == "token_embed":
        return await _compare_tokens(request, body, first, second, answer_id)
    params = PoolingParams(task=task, normalize=None if task == "sparse_embed" else True)
    return await _compare(request, body, first, second, params, answer_id)


async def _shortened(endpoint: Endpoint, side: Side, most: int | None, field: str) -> Side:
    """Returns the side with the first `most` tokens of each text; 0, as in vLLM, is no limit."""
    if not most:
        return side
    if most < 0:
        raise InvalidRequest(f"must be at least 0, got {most}", field)
    cut, possible = endpoint.tokenizer.first_tokens, endpoint.prompts.possible
    return replace(side, texts=[await asyncio.to_thread(cut, possible(text), most) for text in side.texts])


async def _judge(
    request: Request, scorer: PairScorer, body: ScoringRequest, first: Side, second: Side, answer_id: str
) -> ScoredPairs:
    """Scores by a model that was trained to."""
    endpoint = endpoint_of(request)
    truncation = truncation_of(endpoint, body, add_special_tokens=False)
    if truncation is not None and truncation.side == "left":
        raise InvalidRequest("a reranker's prompt is cut at its document's end; possible: right", "truncation_side")
    pairs = zip(first.of(len(second.texts)), second.texts, strict=True)
    most, total, prompts = endpoint.engine.config.scheduler.max_num_waiting_tokens, 0, list[PairPrompt]()
    for i, (query, document) in enumerate(pairs):
        prompts.append(await scorer.prompt(query, document, body.instruction, truncation, second.name(i)))
        total += len(prompts[-1].ids)
        if i and total > most:  # a long query is a part of each
            raise InvalidRequest(f"more than {most} tokens were sent (each prompt has the query); send fewer texts", second.field)
    ids, params = [prompt.ids for prompt in prompts], [prompt.params for prompt in prompts]
    found = await pool(request, endpoint, {second.field: ids}, params, answer_id)
    return ScoredPairs(scorer.scores(found.vectors, body.use_activation), found.usage)


async def _compare(
    request: Request, body: ScoringRequest, first: Side, second: Side, params: PoolingParams, answer_id: str
) -> ScoredPairs:
    """Scores by the cosine of the vectors that /v1/embeddings has for the two texts, or by the product of sparse ones."""
    endpoint = endpoint_of(request)
    texts = endpoint.pooled_texts
    form = prompt_form(endpoint, body, add_special_tokens=texts.special_tokens, prefix=texts.prompt(None))
    prompts = {side.field: await endpoint.prompts.read(side.sent, side.field, form, texts.ids) for side in (first, second)}
    pooled = await pool(request, endpoint, prompts, params, answer_id)
    split = len(first.texts)
    scores = await asyncio.to_thread(similarities, pooled.numbers[:split], pooled.numbers[split:])
    return ScoredPairs(scores, pooled.usage)


async def _compare_tokens(request: Request, body: ScoringRequest, first: Side, second: Side, answer_id: str) -> ScoredPairs:
    """Scores by the vectors that /pooling has for the tokens of the two texts."""
    endpoint = endpoint_of(request)
    params = endpoint.pooled_texts.late.params
    texts, prompts, each = endpoint.pooled_texts, dict[str, list[list[int]]](), list[PoolingParams]()
    endpoint.engine.validate([], params)
    for role, side in zip(ROLES, (first, second), strict=True):
        form = prompt_form(endpoint, body, add_special_tokens=texts.special_tokens, prefix=texts.prompt_of_role(role))
        read = await endpoint.prompts.read(side.sent, side.field, form, texts.reader(role))
        asked = [texts.late.prompt(ids, params, role) for ids in read]
        prompts[side.field] = [ids for ids, _ in asked]
        each += [one for _, one in asked]
        check_answer_size(prompts[side.field], side.field, params, endpoint.engine.model_config, as_text=True)
    pooled = await pool(request, endpoint, prompts, each, answer_id)
    found = iter(pooled.rows)
    queries, documents = (
        [texts.late.vectors(ids, next(found), role) for ids in prompts[side.field]]
        for role, side in zip(ROLES, (first, second), strict=True)
    )
    return ScoredPairs(await asyncio.to_thread(texts.late.scores, queries, documents), pooled.usage)
