"""Beam search over an engine: its outputs, and what becomes of its requests when it ends early."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starling_engine import AsyncEngine, BeamSearchParams, SamplingParams
from starling_engine.errors import EngineAsleep, InvalidRequest, QueueFull
from starling_engine.frontend.beam_requests import BeamRequests
from starling_engine.outputs import CompletionOutput, Logprob, RequestOutput

from tests.engine.real_engine import idle, running

ENDS_SOON = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello!"
LONG = BeamSearchParams(beam_width=4, max_tokens=400, ignore_eos=True)
"""A search that lasts until it is ended."""


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with running(scheduling_policy="priority", max_num_seqs=4) as engine:
        yield engine


async def steps_done(engine: AsyncEngine, tokens: int) -> None:
    """Waits until so many more tokens were sampled."""
    before = engine.stats.generated_tokens_total
    async with asyncio.timeout(60):
        while engine.stats.generated_tokens_total < before + tokens:  # noqa: ASYNC110 - processes send no events
            await asyncio.sleep(0.01)


async def test_outputs_are_as_those_of_sampling(engine: AsyncEngine) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.0, logprobs=2)
    found = await engine.beam_search(ENDS_SOON, params, request_id="mine")
    ids = engine.tokenizer.encode(ENDS_SOON)
    assert (found.request_id, found.prompt, found.prompt_token_ids, found.finished) == ("mine", ENDS_SOON, ids, True)
    assert [output.index for output in found.outputs] == [0, 1, 2]
    scores = [output.cumulative_logprob or 0.0 for output in found.outputs]
    assert scores == sorted(scores, reverse=True)
    assert "stop" in [output.finish_reason for output in found.outputs]
    for output in found.outputs:
        whole = engine.tokenizer.decode([*ids, *output.token_ids])
        assert engine.tokenizer.decode(ids) + output.text == whole
        assert output.logprobs is not None
        rows = list(zip(output.token_ids, output.logprobs, strict=True))
        assert all(row.keys() >= {token} and len(row) in (2, 3) for token, row in rows)
        assert all(entry.decoded_token == engine.tokenizer.token_text(token) for _, row in rows for token, entry in row.items())
        assert sum(row[token].logprob for token, row in rows) == pytest.approx(output.cumulative_logprob)


async def test_the_token_that_ends_an_output_is_in_its_text_if_wanted(engine: AsyncEngine) -> None:
    eos = engine.tokenizer.token_text(engine.model_config.eos_token_ids[0])
    texts = []
    for shown in (False, True):
        params = BeamSearchParams(
            beam_width=3, max_tokens=12, length_penalty=0.0, include_stop_str_in_output=shown, skip_special_tokens=False
        )
        found = await engine.beam_search(ENDS_SOON, params)
        output = next(output for output in found.outputs if output.finish_reason == "stop")
        assert output.token_ids[-1] in engine.model_config.eos_token_ids
        texts.append(output.text)
    assert texts[1].startswith(texts[0]) and texts[1] != texts[0]
    assert eos not in texts[0]


async def test_outputs_end_where_the_model_does(engine: AsyncEngine) -> None:
    found = await engine.beam_search([5] * 508, BeamSearchParams(beam_width=2, max_tokens=100, ignore_eos=True))
    assert [(len(output.token_ids), output.finish_reason) for output in found.outputs] == [(4, "length")] * 2


async def test_a_bad_search_sends_nothing(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="beam_width must be in"):
        await engine.beam_search("The", BeamSearchParams(beam_width=20, max_tokens=3))
    assert not engine.stats.prompt_tokens_total


async def test_a_cancelled_search_aborts_its_requests(engine: AsyncEngine) -> None:
    search = asyncio.create_task(engine.beam_search("The list", LONG))
    await steps_done(engine, 20)
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    assert await idle(engine)
    assert engine.stats.generated_tokens_total < 400


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_search_ends_with_an_error_when_the_engine_is_put_to_sleep(mode: str, engine: AsyncEngine) -> None:
    search = asyncio.create_task(engine.beam_search("The list", LONG))
    await steps_done(engine, 20)
    await engine.sleep(1, mode)
    with pytest.raises(EngineAsleep, match="wake it"):
        await search
    await engine.wake_up()
    assert len((await engine.beam_search("The list", BeamSearchParams(beam_width=2, max_tokens=2))).outputs) == 2


async def test_its_requests_have_its_priority(engine: AsyncEngine) -> None:
    """Others that wait for a seat let a search pass that is more important, at each of its steps."""
    others = SamplingParams(max_tokens=60, ignore_eos=True)
    waiting = [asyncio.create_task(engine.complete(f"{number} is", others)) for number in range(24)]
    await steps_done(engine, 1)
    await engine.beam_search("The list", BeamSearchParams(beam_width=4, max_tokens=2), priority=-1)
    assert sum(not task.done() for task in waiting) >= 8
    assert all(output.finished for output in await asyncio.gather(*waiting))


async def test_its_requests_share_the_prefix_cache_only_with_their_salt(engine: AsyncEngine) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    params = BeamSearchParams(beam_width=2, max_tokens=3)

    async def cached(salt: str) -> int:
        return (await engine.beam_search(prompt, params, cache_salt=salt)).num_cached_tokens

    assert [await cached("a"), await cached("b")] == [0, 0]
    assert await cached("a") == await cached("b") > 0


async def test_a_step_computes_at_most_a_block_of_tokens_for_each_beam(engine: AsyncEngine) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 6
    before = engine.stats
    found = await engine.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
    assert await idle(engine)
    after = engine.stats
    read = after.prefix_queries_total - before.prefix_queries_total
    computed = read - (after.prefix_hits_total - before.prefix_hits_total) - len(found.prompt_token_ids)
    assert read > 4 * 19 * len(found.prompt_token_ids)
    assert computed <= 4 * 19 * engine.config.block_size


async def test_an_error_of_one_request_ends_the_others() -> None:
    ended = []

    async def complete(prompt: list[int], params: SamplingParams, *, request_id: str) -> RequestOutput:
        assert (params.max_tokens, params.logprobs) == (1, 2)
        if prompt == [1]:
            await asyncio.sleep(0)
            raise QueueFull("full", 1.0)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(request_id)
        return RequestOutput(request_id, None, prompt, [CompletionOutput(0, logprobs=[{7: Logprob(-1.0, 1)}])])

    with pytest.raises(QueueFull):
        await BeamRequests(complete, "search", texts=False).expand([[0], [1], [2]], 2)
    assert ended == ["search-0-0", "search-0-2"]
