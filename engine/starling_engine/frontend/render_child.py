"""Renders chats for a server, in a process of its own: `python -m starling_engine.frontend.render_child`.

First comes the renderer, then one conversation after another, on standard input; each is answered on standard output.
"""

import resource
import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.frontend.chat import ChatRenderer
from starling_engine.frontend.frames import read_frame, write_frame
from starling_engine.ipc.child import die_with_parent


@dataclass(frozen=True)
class RenderLimits:
    """What one conversation may take.

    seconds         of processor time, wherever it goes: a template's loops, its filters, compiling it. Long ones take milliseconds
    answer_seconds  until the answer; who takes longer is in a call that cannot be interrupted, or the machine is overloaded
    memory_bytes    that the process may have for data, what it keeps between conversations included
    """

    seconds: float = 2.0
    answer_seconds: float = 10.0
    memory_bytes: int = 256 << 20


class _OutOfTime(BaseException):
    """Not an Exception, so that nothing that a template calls takes it for one of its own."""


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent drains first
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _out_of_time)
    die_with_parent()
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except (EOFError, BrokenPipeError):
        return


def _serve(jobs: BinaryIO, answers: BinaryIO) -> NoReturn:
    given = read_frame(jobs)
    limits, renderer = RenderLimits(**given["limits"]), ChatRenderer.from_frame(given["renderer"])
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    while True:
        write_frame(answers, _answer(renderer, jobs, limits))


def _answer(renderer: ChatRenderer, jobs: BinaryIO, limits: RenderLimits) -> dict[str, Any]:
    try:
        return _rendered(renderer, read_frame(jobs), limits.seconds)
    except InvalidRequest as error:
        return {"refused": error.message, "param": error.param}
    except ModelError as error:
        return {"broken": str(error)}
    except _OutOfTime:
        return {"refused": f"the chat template takes more than {limits.seconds:g} s of processor time", "param": "messages"}
    except (MemoryError, SystemError):  # Python's compiler raises the second when it gets no memory
        words = f"the chat and its template take more than {limits.memory_bytes >> 20} MiB of memory"
        return {"refused": words, "param": "messages", "spent": True}
    except RecursionError:
        return {"refused": "the chat template, or a value for it, is nested too deeply", "param": "messages"}


def _rendered(renderer: ChatRenderer, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        prompt = renderer.render(**job)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"text": prompt.text, "control": prompt.control}


def _out_of_time(_: int, __: FrameType | None) -> None:
    raise _OutOfTime


if __name__ == "__main__":
    main()
