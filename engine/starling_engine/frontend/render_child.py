"""Renders chats for a server, in a process of its own: `python -m starling_engine.frontend.render_child`.

The renderer comes first on standard input, then one conversation after another; standard output has an answer to each. All of them
are frames: a length and JSON. It is Python's own JSON, because clients send halves of surrogate pairs and huge integers.
"""

import json
import resource
import signal
import struct
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from starling_engine.errors import InvalidRequest, ModelError
from starling_engine.frontend.chat import ChatRenderer
from starling_engine.ipc.child import die_with_parent

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class RenderLimits:
    """Limits of a conversation.

    seconds         processor time for compiling the template, its loops and its filters; long templates take milliseconds
    answer_seconds  time until the answer: a longer one is in a call that cannot be interrupted, or the machine is overloaded
    memory_bytes    the process's memory for data, including what is left of earlier conversations
    """

    seconds: float = 2.0
    answer_seconds: float = 10.0
    memory_bytes: int = 256 << 20


class _OutOfTime(BaseException):
    """The processor time is used up. Not an Exception, so that no code of a template catches it."""


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
    limits, renderer = RenderLimits(**given["limits"]), ChatRenderer.from_json(given["renderer"])
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
        return {"refused": words, "param": "messages", "out_of_memory": True}
    except RecursionError:
        return {"refused": "the chat template, or a value for it, is nested too deeply", "param": "messages"}


def _rendered(renderer: ChatRenderer, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        prompt = renderer.render(**job)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"text": prompt.text, "control": prompt.control}


def write_frame(pipe: BinaryIO, value: Any) -> None:
    content = json.dumps(value).encode()
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> Any:
    """Raises EOFError when the pipe's other end is gone."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return json.loads(_exactly(pipe, length))


def _exactly(pipe: BinaryIO, length: int) -> bytes:
    content = pipe.read(length)
    if len(content) < length:
        raise EOFError("the other process is gone")
    return content


def _out_of_time(_: int, __: FrameType | None) -> None:
    raise _OutOfTime


if __name__ == "__main__":
    main()
