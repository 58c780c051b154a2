"""Chats rendered apart from the server, so that no template holds up its event loop, fills its memory or brings it down.

Processes, not threads: a thread cannot be ended, shares the interpreter lock with every stream, and one filter that is called once
(`'x' | center(10000000000)`, a power of large integers) does not come back to where steps could be counted. The kernel counts a
process's processor time and memory, whatever the template does, and a process can be killed.
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
from typing import Any, BinaryIO, cast

from starling_engine.errors import InvalidRequest, ModelError, QueueFull, RequestFailed
from starling_engine.frontend.chat import ChatRenderer
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.frames import read_frame, write_frame
from starling_engine.frontend.render_child import RenderLimits
from starling_engine.frontend.request_progress import RETRY_AFTER

_log = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "starling_engine.frontend.render_child")
GONE = "the process that renders chats is gone"


class RenderProcess:
    """One process, which renders one chat at a time; started when it is first needed, and again after one that was killed.

    At most `places()` chats wait while it renders one; asked each time, for engines grow and shrink.
    """

    def __init__(self, renderer: ChatRenderer, limits: RenderLimits, places: Callable[[], int]) -> None:
        self._renderer = renderer
        self._limits = limits
        self._places = places
        self._given = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._used = False
        self._closed = False
        # The process dies with the thread that started it: this one lives until `close`.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="render")

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return None if self._process is None else self._process.pid

    async def render(self, **job: Any) -> ChatPrompt:
        """As `ChatRenderer.render`. InvalidRequest names the limit that a template passed; RequestFailed is raised once closed.

        Raises QueueFull when too many wait.
        """
        if self._given > (places := self._places()):
            raise QueueFull(f"{places} chats are waiting to be rendered already", RETRY_AFTER)
        self._given += 1
        rendered = asyncio.wrap_future(self._thread.submit(self._render, job))
        rendered.add_done_callback(self._taken)
        # The thread's queue holds a chat until its turn, also when its client has gone: until then it counts.
        return await asyncio.shield(rendered)

    def _taken(self, _: asyncio.Future[ChatPrompt]) -> None:
        self._given -= 1

    def warm_up(self) -> None:
        """Starts the process, and waits for nothing."""
        self._thread.submit(self._running)

    def close(self) -> None:
        """A render that is under way ends with an error, and so do those that wait for it."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _render(self, job: dict[str, Any]) -> ChatPrompt:
        if self._closed:
            raise RequestFailed(GONE)
        used, answer = self._used, self._answer(job)
        if used and answer.get("spent"):
            # What the process kept of earlier chats may have been too much: in a new one this chat shows what it takes by itself.
            answer = self._answer(job)
        return _read(answer)

    def _answer(self, job: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = _ask(self._running(), job, self._limits.answer_seconds)
        except TimeoutError:
            self._end()
            raise InvalidRequest(f"the chat template did not end within {self._limits.answer_seconds:g} s", "messages") from None
        except (OSError, EOFError) as error:
            code = self._end()
            if not self._closed:
                _log.warning("%s (%s, exit status %s)", GONE, error, code)
            raise RequestFailed(GONE) from None
        self._used = True
        if answer.get("spent"):
            self._end()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            # Ctrl-C goes to a terminal's whole process group: in a session of its own it lives on until the server has drained.
            self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            given = {"limits": asdict(self._limits), "renderer": self._renderer.as_frame()}
            write_frame(_pipes(self._process)[0], given)
        return self._process

    def _end(self) -> int | None:
        """Leaves no process, and none of its pipes. The exit status, if there was a process."""
        if (process := self._process) is None:
            return None
        self._process, self._used = None, False
        process.kill()
        process.wait()
        for pipe in _pipes(process):
            with suppress(BrokenPipeError):  # what it has not read
                pipe.close()
        return process.returncode


class ChatRendering:
    """A process for the checkpoint's own templates, and one for those that requests bring.

    Whoever brings an endless one keeps only others who bring theirs waiting.
    """

    def __init__(self, renderer: ChatRenderer, limits: RenderLimits | None = None, *, places: Callable[[], int]) -> None:
        self._templates = renderer.templates
        limits = limits or RenderLimits()
        self._own, self._brought = (RenderProcess(renderer, limits, places) for _ in range(2))

    def open(self) -> None:
        """The first chat need not wait for a process to start."""
        if self._templates.by_name:
            self._own.warm_up()

    async def render(self, *, template: str | None, **job: Any) -> ChatPrompt:
        """As `RenderProcess.render`."""
        process = self._own if template is None or template in self._templates.by_name else self._brought
        return await process.render(template=template, **job)

    def close(self) -> None:
        self._own.close()
        self._brought.close()


def _ask(process: subprocess.Popen[bytes], job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Raises TimeoutError, EOFError or OSError; the process is of no more use then."""
    jobs, answers = _pipes(process)
    write_frame(jobs, job)
    waiting = select.poll()
    waiting.register(answers, select.POLLIN)
    if not waiting.poll(seconds * 1000):
        raise TimeoutError
    return cast("dict[str, Any]", read_frame(answers))


def _read(answer: dict[str, Any]) -> ChatPrompt:
    if "refused" in answer:
        raise InvalidRequest(answer["refused"], answer["param"])
    if "broken" in answer:
        raise ModelError(answer["broken"])
    control = answer["control"]
    return ChatPrompt(answer["text"], None if control is None else tuple((start, end) for start, end in control))


def _pipes(process: subprocess.Popen[bytes]) -> tuple[BinaryIO, BinaryIO]:
    assert process.stdin is not None and process.stdout is not None
    return cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
