"""The inside of a limited process: answers one job after another, each within its limits.

Settings come first on standard input, then the jobs; standard output says that the process is ready, then has an answer to each
job. All of them are frames: a length and JSON. It is Python's own JSON, because clients send halves of surrogate pairs and huge
integers.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn, Protocol

from starling_engine.errors import InvalidRequest, ModelError, PromptTooLong
from starling_engine.ipc.child import die_with_parent
from starling_engine.ipc.priority import lower_priority

Answer = dict[str, Any]
Work = Callable[[Any], Any]
"""Makes an answer of a job, both JSON. May raise InvalidRequest and ModelError."""

SECONDS, MEMORY, NESTING, CRASH = "seconds", "memory", "nesting", "crash"
"""Limits that a job may meet."""
PROCESS_MEMORY = "process_memory"
"""Memory ran out in the process itself, where earlier jobs may have used it up."""

_LENGTH = struct.Struct("!Q")
_LIMITS: dict[int, str] = {signal.SIGPROF: SECONDS, signal.SIGABRT: MEMORY, signal.SIGKILL: MEMORY, signal.SIGSEGV: NESTING}
"""The limit that was met, by the signal that ended a copy: native code aborts without memory, and does not notice a full stack."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a job.

    seconds         processor time
    answer_seconds  time until the answer: a longer one is in a call that cannot be interrupted, or the machine is overloaded
    memory_bytes    memory for data beside that of the process when it is ready, with what is left of earlier jobs
    """

    seconds: float
    answer_seconds: float
    memory_bytes: int


class JobRunner(Protocol):
    """Does jobs within limits."""

    def __init__(self, work: Work, limits: ProcessLimits) -> None: ...

    def answer(self, job: Any) -> Answer: ...


class _OutOfTime(BaseException):
    """The processor time is used up. Not an Exception, so that no code of a job catches it."""


def serve(prepare: Callable[[Any], Work], runner: type[JobRunner]) -> None:
    """Answers jobs until the parent is gone. `prepare` makes of the settings what answers them."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent drains first
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()
    lower_priority()
    with suppress(EOFError, BrokenPipeError):
        _serve(prepare, runner, sys.stdin.buffer, sys.stdout.buffer)


class InPlace:
    """Runs Python code, which is interrupted. The process goes on with what the job has left in it."""

    def __init__(self, work: Work, limits: ProcessLimits) -> None:
        self._work = work
        self._seconds = limits.seconds
        signal.signal(signal.SIGPROF, _out_of_time)

    def answer(self, job: Any) -> Answer:
        try:
            signal.setitimer(signal.ITIMER_PROF, self._seconds)
            try:
                return _work_on(self._work, job)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except _OutOfTime:
            return {"limit": SECONDS}


class InCopies:
    """Runs native code, which no handler of a signal interrupts, in a copy of this process that the kernel ends at a limit.

    Copies have what was prepared from the beginning, so that the next job need not wait for it. One does jobs until it meets a
    limit, or they have left a quarter of the memory in it.
    """

    def __init__(self, work: Work, limits: ProcessLimits) -> None:
        self._work = work
        self._limits = limits
        self._copy: _Copy | None = None

    def answer(self, job: Any) -> Answer:
        copy = self._copy or _Copy(self._work, self._limits)
        answer = copy.answer(job)
        self._copy = None if answer.pop("last") else copy
        if self._copy is None:
            copy.end()
        return answer


class _Copy:
    """A copy of this process."""

    def __init__(self, work: Work, limits: ProcessLimits) -> None:
        jobs, self._jobs = _pipe()
        self._answers, answers = _pipe()
        self._has_ended = False
        self._pid = os.fork()
        if self._pid == 0:
            _live_as_copy(work, limits, jobs, answers)
        jobs.close()
        answers.close()

    def answer(self, job: Any) -> Answer:
        try:
            write_frame(self._jobs, job)
            answer: Answer = read_frame(self._answers)
        except (EOFError, BrokenPipeError):
            return {"limit": _LIMITS.get(self._signal(), CRASH), "last": True}
        return answer

    def end(self) -> None:
        if not self._has_ended:
            os.kill(self._pid, signal.SIGKILL)
            self._signal()
        with suppress(BrokenPipeError):
            self._jobs.close()
        self._answers.close()

    def _signal(self) -> int:
        """Waits for the end, and returns the signal that brought it; 0 for none."""
        status = os.waitpid(self._pid, 0)[1]
        self._has_ended = True
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _live_as_copy(work: Work, limits: ProcessLimits, jobs: BinaryIO, answers: BinaryIO) -> NoReturn:
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a caller can make native code say last words
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        most = _data_bytes() + limits.memory_bytes // 4
        while True:
            job = read_frame(jobs)
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            answer = _caught(partial(_work_on, work, job), MEMORY)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(answers, {**answer, "last": _data_bytes() > most})
    finally:
        os._exit(1)


def _work_on(work: Work, job: Any) -> Answer:
    return {"answer": work(job)}


def write_frame(pipe: BinaryIO, value: Any) -> None:
    content = json.dumps(value).encode()
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> Any:
    """Raises EOFError when the pipe's other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return json.loads(_exactly(pipe, length))


def _serve(prepare: Callable[[Any], Work], runner: type[JobRunner], jobs: BinaryIO, answers: BinaryIO) -> NoReturn:
    given = read_frame(jobs)
    limits = ProcessLimits(**given["limits"])
    try:
        runs = runner(prepare(given["settings"]), limits)
    except ModelError as error:
        write_frame(answers, {"broken": str(error)})
        raise EOFError from error
    limit = _data_bytes() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    write_frame(answers, {"answer": "ready"})
    while True:
        write_frame(answers, _caught(lambda: runs.answer(read_frame(jobs)), PROCESS_MEMORY))


def _caught(answer: Callable[[], Answer], memory: str) -> Answer:
    """Returns an answer, or what kept it from being made; `memory` is the limit that is met without any."""
    try:
        return answer()
    except InvalidRequest as error:
        return {"refused": error.message, "param": error.param, "too_long": isinstance(error, PromptTooLong)}
    except ModelError as error:
        return {"broken": str(error)}
    except (MemoryError, SystemError):  # Python's compiler raises the second when it gets no memory
        return {"limit": memory}
    except RecursionError:
        return {"limit": NESTING}


def _data_bytes() -> int:
    """This process's memory for data, as RLIMIT_DATA counts it; see statm in proc(5). Only Linux has it, and that limit."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[5]) * resource.getpagesize() if statm.exists() else 0


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")


def _exactly(pipe: BinaryIO, length: int) -> bytes:
    content = pipe.read(length)
    if len(content) < length:
        raise EOFError("the other process is gone")
    return content


def _out_of_time(_: int, __: FrameType | None) -> None:
    raise _OutOfTime
