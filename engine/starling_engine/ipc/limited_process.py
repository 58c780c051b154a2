"""A process for work that a caller could make endless, huge or fatal, so that none of it harms the server.

Threads would not do: a thread cannot be ended, it shares the interpreter lock with every stream, and native code that gets no
memory ends its whole process. The kernel counts a process's processor time and memory, whatever it does, and it can be killed.
"""

import asyncio
import logging
import select
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO, NamedTuple, cast

from starling_engine.errors import RETRY_AFTER, InvalidRequest, JobTooLarge, ModelError, PromptTooLong, QueueFull, RequestFailed
from starling_engine.ipc.limited_child import (
    CRASH,
    MEMORY,
    NESTING,
    PROCESS_MEMORY,
    SECONDS,
    Answer,
    ProcessLimits,
    read_frame,
    write_frame,
)

_log = logging.getLogger(__name__)
START_SECONDS = 60.0
"""Longest time until the process is ready for its first job."""


class JobWords(NamedTuple):
    """A job in the words of its callers: "the {one} takes too long", "too many {many} wait to be {done}"."""

    one: str
    many: str
    done: str


class LimitedProcess:
    """A process that does one job at a time; started when it is first needed, and again after it was killed.

    At most `max_waiting()` jobs wait while it does one; called each time, because engines grow and shrink.
    """

    def __init__(
        self, module: str, settings: Any, limits: ProcessLimits, words: JobWords, *, max_waiting: Callable[[], int]
    ) -> None:
        """`module` calls `limited_child.serve`, and gets the settings (JSON)."""
        self._command = (sys.executable, "-m", module)
        self._given = {"limits": asdict(limits), "settings": settings}
        self._limits = limits
        self._words = words
        self._max_waiting = max_waiting
        self._open = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._used = False
        self._closed = False
        # The process dies with the thread that started it; this thread lives until `close`.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="limited")

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    async def answer(self, job: Any, param: str) -> Any:
        """Returns the answer to a job, both JSON. `param` is the request's field that it comes from.

        Raises what the job raises (InvalidRequest, ModelError); InvalidRequest that names a limit which the job meets, which is a
        JobTooLarge for memory; QueueFull when too many wait; RequestFailed when the process is closed, or was killed from outside.
        """
        if self._closed:
            raise RequestFailed(self._gone)
        if self._open > (most := self._max_waiting()):
            raise QueueFull(f"{most} {self._words.many} are waiting to be {self._words.done} already", RETRY_AFTER)
        self._open += 1
        answered = asyncio.wrap_future(self._thread.submit(self._answer, job, param))
        answered.add_done_callback(self._on_answered)
        # A job stays in the thread's queue, and counts, even when its client has gone.
        return await asyncio.shield(answered)

    def _on_answered(self, answered: asyncio.Future[Any]) -> None:
        self._open -= 1
        if not answered.cancelled():
            answered.exception()  # asyncio logs one with a traceback that nobody takes, as when the client has gone

    def warm_up(self) -> None:
        """Starts the process, without waiting for it."""
        self._thread.submit(self._warm_up)

    def _warm_up(self) -> None:
        try:
            self._running()
        except (OSError, EOFError):  # the first job tries again, and says why
            self._end()

    def close(self) -> None:
        """Ends the process. The current job and those that wait end with an error. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
            with suppress(RuntimeError):  # the interpreter ends, and takes no work for threads any more
                self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _answer(self, job: Any, param: str) -> Any:
        if self._closed:
            raise RequestFailed(self._gone)
        used, answer = self._used, self._ask(job, param)
        if used and answer.get("limit") == PROCESS_MEMORY:
            # Earlier jobs may have left too much in memory: a new process shows what this one takes by itself.
            answer = self._ask(job, param)
        if "limit" in answer:
            kind = JobTooLarge if answer["limit"] in (MEMORY, PROCESS_MEMORY) else InvalidRequest
            raise kind(self._met(answer["limit"]), param)
        return _read(answer)

    def _ask(self, job: Any, param: str) -> Answer:
        try:
            process = self._running()
            write_frame(_pipes(process)[0], job)
            answer = _receive(process, self._limits.answer_seconds)
        except TimeoutError:
            self._end()
            words = f"the {self._words.one} did not end within {self._limits.answer_seconds:g} s"
            raise InvalidRequest(words, param) from None
        except (OSError, EOFError) as error:
            code = self._end()
            if not self._closed:
                _log.warning("%s (%s, exit status %s)", self._gone, error, code)
            raise RequestFailed(self._gone) from None
        self._used = True
        if answer.get("limit") == PROCESS_MEMORY:
            self._end()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        return self._process or self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # Ctrl-C goes to a terminal's whole process group; in its own session the process lives until the server has drained.
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process = process
        write_frame(_pipes(process)[0], self._given)
        try:
            _read(_receive(process, START_SECONDS))
        except ModelError:
            self._end()
            raise
        except TimeoutError:
            raise EOFError(f"it was not ready within {START_SECONDS:g} s") from None
        return process

    def _end(self) -> int | None:
        """Ends the process and closes its pipes. Returns the exit status, if there was a process."""
        if (process := self._process) is None:
            return None
        self._process, self._used = None, False
        process.kill()
        process.wait()
        for pipe in _pipes(process):
            with suppress(BrokenPipeError):  # input that it has not read
                pipe.close()
        return process.returncode

    def _met(self, limit: str) -> str:
        mebibytes = self._limits.memory_bytes >> 20
        says = {
            SECONDS: f"takes more than {self._limits.seconds:g} s of processor time",
            MEMORY: f"takes more than {mebibytes} MiB of memory",
            PROCESS_MEMORY: f"takes more than {mebibytes} MiB of memory",
            NESTING: "is nested too deeply",
            CRASH: "cannot be processed: it makes the library fail that reads it",
        }
        return f"the {self._words.one} {says[limit]}"

    @property
    def _gone(self) -> str:
        return f"the process for {self._words.many} is gone"


def _receive(process: subprocess.Popen[bytes], seconds: float) -> Answer:
    """Returns the next answer. Raises TimeoutError, EOFError or OSError; the process is useless then."""
    answers = _pipes(process)[1]
    waiting = select.poll()
    waiting.register(answers, select.POLLIN)
    if not waiting.poll(seconds * 1000):
        raise TimeoutError
    return cast("Answer", read_frame(answers))


def _read(answer: Answer) -> Any:
    if "refused" in answer:
        kind = PromptTooLong if answer["too_long"] else InvalidRequest
        raise kind(answer["refused"], answer["param"])
    if "broken" in answer:
        raise ModelError(answer["broken"])
    return answer["answer"]


def _pipes(process: subprocess.Popen[bytes]) -> tuple[BinaryIO, BinaryIO]:
    assert process.stdin is not None and process.stdout is not None
    return cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
