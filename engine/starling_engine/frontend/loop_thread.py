"""An event loop in a thread of its own, for callers without async code."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from starling_engine.errors import EngineDead

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads. The thread is a daemon: the interpreter ends without waiting for it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and waits for its result. When the caller is interrupted (Ctrl-C), the coroutine is cancelled.

        Raises EngineDead after `stop`.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise EngineDead("the engine was shut down")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def is_current(self) -> bool:
        """Returns whether the caller runs in this thread, where waiting for a coroutine would never end."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Ends the thread; nothing may be run afterwards."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
