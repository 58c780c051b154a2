"""Answers steps in the order in which they were launched."""

import queue
import sys
import threading
from collections.abc import Callable

from starling_engine.step import StepResult
from starling_engine.worker.pending_step import PendingStep

SWITCH_SECONDS = 0.0005
MOST_BEHIND = 2
"""Steps that wait to be answered. Nobody waits for the answers of a rank that does not sample, and the buffers that they are
read from take turns (`pinned.ENTRIES`)."""


class ResultPump:
    """Steps that a device works on are waited for in a thread, so that the one that launches them can give it the next meanwhile.

    `answer` gets the results, `failed` whatever `finish` raises; nothing is answered after that. Both are called by one thread at a
    time: the caller's, until a step comes that is to be waited for.
    """

    def __init__(self, answer: Callable[[StepResult], None], failed: Callable[[BaseException], None]) -> None:
        self._answer = answer
        self._failed = failed
        self._launched: queue.Queue[PendingStep | None] = queue.Queue(MOST_BEHIND)
        self._thread: threading.Thread | None = None

    def add(self, launched: PendingStep) -> None:
        """Called by one thread, which waits when it is too far ahead."""
        if self._thread is None and launched.ready:
            self._answer(launched.finish())
            return
        if self._thread is None:
            # The threads hand steps over to each other that may be shorter than the interpreter's usual turn of 5 ms.
            sys.setswitchinterval(SWITCH_SECONDS)
            self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
            self._thread.start()
        self._launched.put(launched)

    def settle(self) -> None:
        """Waits until all that was added is answered, or lost with a failure."""
        self._launched.join()

    def close(self, timeout: float) -> None:
        if self._thread is not None:
            self._launched.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        failed = False
        while (launched := self._launched.get()) is not None:
            try:
                if not failed:
                    self._answer(launched.finish())
            except BaseException as error:  # noqa: BLE001 - whoever waits for the results is told
                failed = True
                self._failed(error)
            finally:
                self._launched.task_done()
