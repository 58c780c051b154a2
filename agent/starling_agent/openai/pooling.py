"""Prompts of one request that become vectors in the engine."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import Request
from starling_engine import AsyncEngine, PoolingParams
from starling_engine.frontend.gathering import gather_or_cancel
from starling_engine.frontend.pooled_texts import truncation_to
from starling_engine.frontend.prompt_encoder import PromptForm
from starling_engine.frontend.tokenizer import Truncation
from starling_engine.outputs import PooledNumbers, PoolingRequestOutput, SparseVector, TokenRows

from starling_agent.openai.endpoint import Endpoint, caller_of
from starling_agent.openai.field_names import errors_named
from starling_agent.openai.protocol.answers import Usage, make_usage
from starling_agent.openai.protocol.embedding import PooledRequest

OPEN_INPUTS = 64
"""Inputs of one request in the engine at once. A long list neither fills the queue nor is refused for its length."""


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """Numbers that the engine made of each prompt, and the tokens of all of them."""

    numbers: list[PooledNumbers]
    usage: Usage

    @property
    def vectors(self) -> list[list[float]]:
        """The numbers, of a task that gives one vector for each prompt."""
        return [numbers for numbers in self.numbers if isinstance(numbers, list)]

    @property
    def rows(self) -> list[TokenRows]:
        """The numbers, of a task that gives some for each token."""
        return [numbers for numbers in self.numbers if not isinstance(numbers, list | SparseVector)]


async def pool(
    request: Request,
    endpoint: Endpoint,
    prompts: Mapping[str, list[list[int]]],
    params: PoolingParams | Sequence[PoolingParams],
    answer_id: str,
) -> PooledPrompts:
    """Returns the numbers of the prompts; the first failure, or a client that is gone, cancels the others.

    `prompts` has them by the request's fields that they are of, which errors name; `params` are for all of them, or for each.
    """
    semaphore = asyncio.Semaphore(OPEN_INPUTS)
    salt = caller_of(request).cache_salt(None)

    async def one(ids: list[int], wanted: PoolingParams, engine_id: str) -> PoolingRequestOutput:
        async with semaphore:
            with endpoint.metrics.pooling(len(ids)):
                return await endpoint.engine.encode(ids, wanted, request_id=engine_id, cache_salt=salt)

    flat = list(itertools.chain(*prompts.values()))
    each = [params] * len(flat) if isinstance(params, PoolingParams) else params
    if each:
        check_prompts(endpoint.engine, prompts, each[0])
    pending = gather_or_cancel(one(ids, wanted, f"{answer_id}-{i}") for i, (ids, wanted) in enumerate(zip(flat, each, strict=True)))
    found = await endpoint.open_requests.run(request.receive, pending)
    tokens, cached = sum(len(output.prompt_token_ids) for output in found), sum(output.num_cached_tokens for output in found)
    return PooledPrompts([output.outputs.data for output in found], make_usage(tokens, 0, cached))


def check_prompts(engine: AsyncEngine, prompts: Mapping[str, list[list[int]]], params: PoolingParams) -> None:
    """Raises InvalidRequest naming the request's field for a prompt that can never run."""
    for field, of_field in prompts.items():
        with errors_named({"prompt": field}):
            engine.validate(of_field, params)


def prompt_form(endpoint: Endpoint, body: PooledRequest, *, add_special_tokens: bool, prefix: str = "") -> PromptForm:
    """Returns how the request's prompts become token ids. Raises InvalidRequest for a truncation that leaves no text."""
    return PromptForm(add_special_tokens, prefix, truncation_of(endpoint, body, add_special_tokens), room=0)


def truncation_of(endpoint: Endpoint, body: PooledRequest, add_special_tokens: bool) -> Truncation | None:
    least = endpoint.tokenizer.num_around(add_special_tokens) + 1
    return truncation_to(body.truncate_prompt_tokens, body.truncation_side, least, endpoint.engine.cores.longest_request)
