"""Waits for what comes true by itself."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def until(
    check: Callable[[], Awaitable[Any]],
    what: str,
    seconds: float = 60.0,
    shown: Callable[[], Awaitable[Any]] | None = None,
) -> Any:
    """Returns the first true answer. Fails with what was waited for, and what is there instead."""
    end = time.monotonic() + seconds
    while not (answer := await check()):
        if time.monotonic() > end:
            instead = "" if shown is None else f"; instead: {json.dumps(await shown(), indent=1)[-4000:]}"
            raise AssertionError(f"waited {seconds} s for {what}{instead}")
        await asyncio.sleep(0.05)
    return answer
