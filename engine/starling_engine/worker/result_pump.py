"""Sends steps' results in the order in which the steps were launched."""

import queue
import sys
import threading
from collections.abc import Callable

from starling_engine.step import StepResult
from starling_engine.worker.pending_step import PendingStep

SWITCH_SECONDS = 0.0005
MOST_BEHIND = 2
"""Limit of launched steps whose results were not read. Nobody waits for those of a rank that does not sample, and the buffers that
they are read from take turns (`pinned.ENTRIES`)."""


class ResultPump:
    """Waits for steps in a thread, so that the thread that launches them can give the device the next one meanwhile.

    `send` gets the results, `failed` any error that `finish` raises; nothing is sent after that. Both are called by one thread at a
    time: the caller's, until a step comes that is not ready at once.
    """

    def __init__(self, send: Callable[[StepResult], None], failed: Callable[[BaseException], None]) -> None:
        self._send = send
        self._failed = failed
        self._launched: queue.Queue[PendingStep | None] = queue.Queue(MOST_BEHIND)
        self._thread: threading.Thread | None = None

    def add(self, launched: PendingStep) -> None:
        """Adds a launched step. The thread that calls waits when it is too far ahead."""
        if self._thread is None and launched.ready:
            self._send(launched.finish())
            return
        if self._thread is None:
            # Steps may be shorter than the interpreter's usual switch interval of 5 ms.
            sys.setswitchinterval(SWITCH_SECONDS)
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()
        self._launched.put(launched)

    def settle(self) -> None:
        """Waits until the result of every added step was sent, or lost with a failure."""
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
                    self._send(launched.finish())
            except BaseException as error:  # noqa: BLE001 - it is reported where the results are waited for
                failed = True
                self._failed(error)
            finally:
                self._launched.task_done()
