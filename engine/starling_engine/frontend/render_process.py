"""Renders chats in other processes, so that no template can block the server's event loop, fill its memory or crash it.

Threads would not do: a thread cannot be ended, and it shares the interpreter lock with every stream. A single filter
(`'x' | center(10000000000)`, a power of large integers) never returns to code that could count its steps. The kernel counts a
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
from starling_engine.frontend.render_child import RenderLimits, read_frame, write_frame
from starling_engine.frontend.request_progress import RETRY_AFTER

_log = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "starling_engine.frontend.render_child")
GONE = "the process that renders chats is gone"


class RenderProcess:
    """A process that renders one chat at a time; started when it is first needed, and again after it was killed.

    At most `max_waiting()` chats wait while it renders one; called each time, because engines grow and shrink.
    """

    def __init__(self, renderer: ChatRenderer, limits: RenderLimits, max_waiting: Callable[[], int]) -> None:
        self._renderer = renderer
        self._limits = limits
        self._max_waiting = max_waiting
        self._open = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._used = False
        self._closed = False
        # The process dies with the thread that started it; this thread lives until `close`.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="render")

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    async def render(self, **job: Any) -> ChatPrompt:
        """Renders a chat as `ChatRenderer.render` does.

        Raises InvalidRequest that names the exceeded limit, QueueFull when too many wait, RequestFailed once closed.
        """
        if self._open > (most := self._max_waiting()):
            raise QueueFull(f"{most} chats are waiting to be rendered already", RETRY_AFTER)
        self._open += 1
        rendered = asyncio.wrap_future(self._thread.submit(self._render, job))
        rendered.add_done_callback(self._on_rendered)
        # A chat stays in the thread's queue, and counts, even when its client has gone.
        return await asyncio.shield(rendered)

    def _on_rendered(self, _: asyncio.Future[ChatPrompt]) -> None:
        self._open -= 1

    def warm_up(self) -> None:
        """Starts the process, without waiting for it."""
        self._thread.submit(self._running)

    def close(self) -> None:
        """Ends the process. The current chat and those that wait end with an error."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _render(self, job: dict[str, Any]) -> ChatPrompt:
        if self._closed:
            raise RequestFailed(GONE)
        used, answer = self._used, self._answer(job)
        if used and answer.get("out_of_memory"):
            # Earlier chats may have left too much in memory: a new process shows what this chat takes by itself.
            answer = self._answer(job)
        return _read(answer)

    def _answer(self, job: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = _request(self._running(), job, self._limits.answer_seconds)
        except TimeoutError:
            self._end()
            raise InvalidRequest(f"the chat template did not end within {self._limits.answer_seconds:g} s", "messages") from None
        except (OSError, EOFError) as error:
            code = self._end()
            if not self._closed:
                _log.warning("%s (%s, exit status %s)", GONE, error, code)
            raise RequestFailed(GONE) from None
        self._used = True
        if answer.get("out_of_memory"):
            self._end()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            # Ctrl-C goes to a terminal's whole process group; in its own session the process lives until the server has drained.
            self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            given = {"limits": asdict(self._limits), "renderer": self._renderer.to_json()}
            write_frame(_pipes(self._process)[0], given)
        return self._process

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


class ChatRendering:
    """A process for the checkpoint's templates, and one for templates of requests, which can hold up only each other."""

    def __init__(self, renderer: ChatRenderer, limits: RenderLimits | None = None, *, max_waiting: Callable[[], int]) -> None:
        self._templates = renderer.templates
        limits = limits or RenderLimits()
        self._checkpoint_process, self._request_process = (RenderProcess(renderer, limits, max_waiting) for _ in range(2))

    def open(self) -> None:
        """Starts the process now, so that the first chat need not wait for it."""
        if self._templates.by_name:
            self._checkpoint_process.warm_up()

    async def render(self, *, template: str | None, **job: Any) -> ChatPrompt:
        """Renders a chat, as `RenderProcess.render`."""
        known = template is None or template in self._templates.by_name
        process = self._checkpoint_process if known else self._request_process
        return await process.render(template=template, **job)

    def close(self) -> None:
        self._checkpoint_process.close()
        self._request_process.close()


def _request(process: subprocess.Popen[bytes], job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Sends a chat and returns the answer. Raises TimeoutError, EOFError or OSError; the process is useless then."""
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
