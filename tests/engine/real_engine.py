"""Real engines for tests: the repository's own model in a core process of its own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starling_engine import AsyncEngine, EngineArgs

MODEL = str(Path(__file__).parents[2] / "models" / "starling-pydoc")
KV_BYTES = 64 << 20


def engine_args(**args: Any) -> EngineArgs:
    settings: dict[str, Any] = {
        "model": MODEL,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": KV_BYTES,
        "num_threads": 1,
        "show_progress": False,
    }
    return EngineArgs(**{**settings, **args})


@asynccontextmanager
async def running(**args: Any) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(engine_args(**args))
    try:
        yield engine
    finally:
        await engine.shutdown()


async def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - processes send no events
            await asyncio.sleep(0.01)


async def idle(engine: AsyncEngine) -> bool:
    """Returns whether the core gets to a state without requests, with every block free, and stays there."""
    for _ in range(300):
        await asyncio.sleep(0.1)
        stats = engine.stats
        if not (stats.running or stats.waiting or stats.kv_blocks_used):
            await asyncio.sleep(0.6)  # one ping later it must still be so
            stats = engine.stats
            return not (stats.running or stats.waiting or stats.kv_blocks_used)
    return False
