"""Groups of engine cores, each a process with ranks of its own, that hold a model's experts among them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starling_engine import AsyncEngine, SamplingParams

from tests.engine.checkpoints import STEPS, Reference
from tests.engine.running import MODEL, running

GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


@asynccontextmanager
async def group(reference: Reference, **args: Any) -> AsyncIterator[AsyncEngine]:
    settings: dict[str, Any] = {"enable_expert_parallel": True, "max_num_batched_tokens": 24, "progress_timeout": 10.0}
    async with running(model=str(reference.folder), tokenizer=MODEL, **settings, **args) as engine:
        yield engine


async def complete(engine: AsyncEngine, reference: Reference, **options: Any) -> list[int]:
    output = await engine.complete(reference.prompt, GREEDY, **options)
    return output.outputs[0].token_ids


async def complete_many(engine: AsyncEngine, reference: Reference, count: int) -> list[list[int]]:
    """At once, each with a cache of its own."""
    return await asyncio.gather(*(complete(engine, reference, cache_salt=str(i)) for i in range(count)))
