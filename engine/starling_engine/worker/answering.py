"""Answers steps in the order in which they were launched."""

import queue
import threading
from collections.abc import Callable

from starling_engine.step import StepResult
from starling_engine.worker.launched import Launched


class Answering:
    """Steps that a device works on are waited for in a thread, so that the one that launches them can give it the next meanwhile.

    `answer` gets the results, `failed` whatever `finish` raises; nothing is answered after that.
    """

    def __init__(self, answer: Callable[[StepResult], None], failed: Callable[[BaseException], None]) -> None:
        self._answer = answer
        self._failed = failed
        self._launched: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, launched: Launched) -> None:
        """Called by one thread."""
        if self._thread is None and launched.ready:
            self._answer(launched.finish())
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
            self._thread.start()
        self._launched.put(launched)

    def close(self, timeout: float) -> None:
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                self._answer(launched.finish())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the results is told
            self._failed(error)
